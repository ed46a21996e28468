"""The few instructions that Numba CUDA has no name for, as intrinsics; and what Numba's simulator runs in their place.

Addresses are int64, other integers uint32 unless a name says otherwise. This is the only place where the simulator runs
other code than a GPU.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numba import config, cuda, types

if not config.ENABLE_CUDASIM:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    kernel = cuda.jit  # the decorators of kernels and of the functions they call
    function = cuda.jit(device=True, forceinline=True)

    _INTEGERS = {kind: ir.IntType(kind.bitwidth) for kind in (types.uint16, types.uint32, types.uint64, types.int32)}

    def _assembly(
        builder: Any,
        result: Any,
        text: str,
        constraints: str,
        args: Any,
        meeting: bool = False,
        side_effect: bool = False,
    ) -> Any:
        """An instruction; at a ``meeting`` of lanes, LLVM may not copy it into their branches."""
        signature = ir.FunctionType(result, [arg.type for arg in args])
        assembly = ir.InlineAsm(signature, text, constraints, side_effect=meeting or side_effect)
        return builder.call(assembly, args, attrs=("convergent",) if meeting else ())

    def _global_pointer(builder: Any, address: Any, kind: Any) -> Any:
        return builder.inttoptr(address, ir.PointerType(_INTEGERS[kind], addrspace=1))

    def _load(kind: Any, result: Any) -> Any:
        @intrinsic
        def load(typingctx, address):
            def body(context, builder, signature, args):
                word = builder.load(_global_pointer(builder, args[0], kind), align=kind.bitwidth // 8)
                return context.cast(builder, word, kind, result)

            return result(types.int64), body

        return load

    def _store(kind: Any, given: Any) -> Any:
        @intrinsic
        def store(typingctx, address, value):
            def body(context, builder, signature, args):
                word = context.cast(builder, args[1], given, kind)
                builder.store(word, _global_pointer(builder, args[0], kind), align=kind.bitwidth // 8)
                return context.get_dummy_value()

            return types.void(types.int64, given), body

        return store

    def _unary(text: str) -> Any:
        @intrinsic
        def operate(typingctx, a):
            def body(context, builder, signature, args):
                return _assembly(builder, ir.IntType(32), text, "=r,r", args)

            return types.uint32(types.uint32), body

        return operate

    def _binary(text: str, meeting: bool = False) -> Any:
        @intrinsic
        def operate(typingctx, a, b):
            def body(context, builder, signature, args):
                return _assembly(builder, ir.IntType(32), text, "=r,r,r", args, meeting)

            return types.uint32(types.uint32, types.uint32), body

        return operate

    load_u16, load_u32 = _load(types.uint16, types.uint32), _load(types.uint32, types.uint32)
    load_u64 = _load(types.uint64, types.uint64)
    store_u16 = _store(types.uint16, types.uint32)
    store_u32, store_u64 = (_store(kind, kind) for kind in (types.uint32, types.uint64))
    load_i32 = _load(types.int32, types.int64)

    _FLOAT32 = "{{.reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; {}.f32 a, a, b; mov.b32 $0, a;}}"

    larger_bfloat16 = _binary("max.NaN.bf16x2 $0, $1, $2;")
    larger_float16 = _binary("max.NaN.f16x2 $0, $1, $2;")
    larger_float32 = _binary(_FLOAT32.format("max.NaN"))
    larger_bfloat16_number = _binary("max.bf16x2 $0, $1, $2;")  # NaN only where both are
    larger_float16_number = _binary("max.f16x2 $0, $1, $2;")
    larger_float32_number = _binary(_FLOAT32.format("max"))

    # fp32 arithmetic on bits, each operation rounded by itself, subnormals kept; see float32.cuh.
    _OF_TWO = "{.reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; "
    add_float32 = _binary(_OF_TWO + "add.rn.f32 a, a, b; mov.b32 $0, a;}")
    multiply_float32 = _binary(_OF_TWO + "mul.rn.f32 a, a, b; mov.b32 $0, a;}")
    reciprocal_root = _unary(
        "{.reg .f32 a; mov.b32 a, $1; sqrt.rn.f32 a, a; rcp.rn.f32 a, a; mov.b32 $0, a;}"  # 1 / sqrt(x), rounded twice
    )
    single_of_float16 = _unary(  # of the lower half of a word
        "{.reg .b16 low, high; .reg .f32 a; mov.b32 {low, high}, $1; cvt.f32.f16 a, low; mov.b32 $0, a;}"
    )
    # Two fp32 numbers as one word of 16-bit ones, the first in its lower half.
    word_of_bfloat16 = _binary(_OF_TWO + "cvt.rn.bf16x2.f32 $0, b, a;}")
    word_of_float16 = _binary(_OF_TWO + "cvt.rn.f16x2.f32 $0, b, a;}")

    #: The value of the lane whose number differs in the bits of a mask.
    shuffle_xor = _binary("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", meeting=True)

    @intrinsic
    def store_words(typingctx, address, words):
        """Store four words at a 16-byte boundary."""

        def body(context, builder, signature, args):
            four = [builder.extract_value(args[1], i) for i in range(4)]
            text, constraints = "st.global.v4.u32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r,~{memory}"
            _assembly(builder, ir.VoidType(), text, constraints, [args[0], *four], side_effect=True)
            return context.get_dummy_value()

        return types.void(types.int64, types.UniTuple(types.uint32, 4)), body

    @intrinsic
    def load_once(typingctx, address):
        """The four words at a 16-byte boundary, which no thread writes during the launch: no line is kept in L1."""
        result = types.UniTuple(types.uint32, 4)

        def body(context, builder, signature, args):
            four = _assembly(
                builder,
                ir.LiteralStructType([ir.IntType(32)] * 4),
                "ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];",
                "=r,=r,=r,=r,l",
                args,
            )
            return context.make_tuple(builder, result, [builder.extract_value(four, i) for i in range(4)])

        return result(types.int64), body

    @intrinsic
    def warp_max(typingctx, value):
        """The largest value over the 32 lanes of a warp, in every lane."""

        def body(context, builder, signature, args):
            text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
            return _assembly(builder, ir.IntType(32), text, "=r,r", args, meeting=True)

        return types.uint32(types.uint32), body

    @intrinsic
    def float_bits(typingctx, number):
        """The bits of the fp32 number equal to an integer."""

        def body(context, builder, signature, args):
            return builder.bitcast(builder.uitofp(args[0], ir.FloatType()), ir.IntType(32))

        return types.uint32(types.uint32), body

    @intrinsic
    def product_bits(typingctx, number, factor):
        """The bits of the fp32 product of an integer, rounded to fp32, and the fp32 number with the bits ``factor``."""

        def body(context, builder, signature, args):
            product = builder.fmul(builder.uitofp(args[0], ir.FloatType()), builder.bitcast(args[1], ir.FloatType()))
            return builder.bitcast(product, ir.IntType(32))

        return types.uint32(types.uint32, types.uint32), body

    @intrinsic
    def integer_of_float_bits(typingctx, bits):
        """The integer equal to the fp32 number with these bits."""

        def body(context, builder, signature, args):
            return builder.fptoui(builder.bitcast(args[0], ir.FloatType()), ir.IntType(32))

        return types.uint32(types.uint32), body

else:
    _LANES = [0] * 1024
    _WARPS = [threading.Barrier(32) for _ in range(32)]  # the simulator runs one block at a time, on Python threads

    def kernel(max_registers):
        return cuda.jit

    function = cuda.jit(device=True)

    def _read(address: int, kind: Any) -> Any:
        size = np.dtype(kind).itemsize
        assert address % size == 0
        return np.frombuffer(ctypes.string_at(int(address), size), kind)[0]

    def _write(address: int, value: Any, kind: Any) -> None:
        assert address % np.dtype(kind).itemsize == 0
        ctypes.memmove(int(address), kind(value).tobytes(), np.dtype(kind).itemsize)

    def load_u16(address):
        return np.uint32(_read(address, np.uint16))

    def load_u32(address):
        return _read(address, np.uint32)

    def load_u64(address):
        return _read(address, np.uint64)

    def store_u16(address, value):
        _write(address, value, np.uint16)

    def load_i32(address):
        return np.int64(_read(address, np.int32))

    def store_u32(address, value):
        _write(address, value, np.uint32)

    def store_u64(address, value):
        _write(address, value, np.uint64)

    def load_once(address):
        assert address % 16 == 0
        return tuple(_read(address + 4 * i, np.uint32) for i in range(4))

    def _larger(maximum):
        """The three functions that take the larger of two words' logits by ``maximum``."""

        def larger_bfloat16(a, b):
            high = larger_float32(a & np.uint32(0xFFFF0000), b & np.uint32(0xFFFF0000)) & np.uint32(0xFFFF0000)
            return high | larger_float32(a << np.uint32(16), b << np.uint32(16)) >> np.uint32(16)

        def larger_float16(a, b):
            return maximum(np.array([a]).view(np.float16), np.array([b]).view(np.float16)).view(np.uint32)[0]

        def larger_float32(a, b):
            return maximum(a.view(np.float32), b.view(np.float32)).view(np.uint32)

        return larger_bfloat16, larger_float16, larger_float32

    larger_bfloat16, larger_float16, larger_float32 = _larger(np.maximum)
    larger_bfloat16_number, larger_float16_number, larger_float32_number = _larger(np.fmax)

    def _lanes(value):
        """The values of all lanes of the warp, and the own lane's number."""
        thread = threading.current_thread().threadIdx.x
        warp = _WARPS[thread // 32]
        _LANES[thread] = value
        warp.wait()
        values = _LANES[thread // 32 * 32 : thread // 32 * 32 + 32]
        warp.wait()
        return values, thread % 32

    def warp_max(value):
        return max(_lanes(value)[0])

    def shuffle_xor(value, mask):
        values, lane = _lanes(value)
        return values[lane ^ int(mask)]

    def store_words(address, words):
        assert address % 16 == 0
        for i, word in enumerate(words):
            _write(address + 4 * i, word, np.uint32)

    def _single(bits):
        return np.uint32(bits).view(np.float32)

    def add_float32(a, b):
        return (_single(a) + _single(b)).view(np.uint32)

    def multiply_float32(a, b):
        return (_single(a) * _single(b)).view(np.uint32)

    def reciprocal_root(x):
        return (np.float32(1) / np.sqrt(_single(x))).view(np.uint32)

    def single_of_float16(word):
        return np.float32(np.uint16(word & np.uint32(0xFFFF)).view(np.float16)).view(np.uint32)

    def _word_of(kind, low, high):
        with np.errstate(over="ignore"):
            return np.array([_single(low), _single(high)]).astype(kind).view(np.uint32)[0]

    def word_of_bfloat16(low, high):
        import ml_dtypes

        return _word_of(ml_dtypes.bfloat16, low, high)

    def word_of_float16(low, high):
        return _word_of(np.float16, low, high)

    def float_bits(number):
        return np.float32(number).view(np.uint32)

    def product_bits(number, factor):
        return (np.float32(number) * factor.view(np.float32)).view(np.uint32)

    def integer_of_float_bits(bits):
        return np.uint32(bits.view(np.float32))
