"""transform.cuh over all 16-bit patterns and many of fp32: the bits of vpa/transform.py, on the CPU and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import DTYPES, to_host
from test_transform import TRANSFORMS, numbers, same

from vpa import kernels, transform
from vpa.backends.launches import DTYPE_CODES

ENTRY = """
extern "C" __global__ void all_words(const Word* words, Word* results, i64 count) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        results[i] = transformed(words[i]);
    }
}
"""


def text_of(settings: transform.Transform, dtype: str) -> str:
    scale, soft_cap = (int(np.float32(number or 0).view(np.uint32)) for number in (settings.scale, settings.soft_cap))
    defines = {"DTYPE": DTYPE_CODES[DTYPES[dtype]], "TRANSFORM": 1, "SCALE": scale, "SOFT_CAP": soft_cap}
    lines = [f"#define VPA_{name} {value}" for name, value in defines.items()]
    files = "portable.cuh", "order.cuh", "rounding.cuh", "transform.cuh"
    return "\n".join([*lines, *map(kernels.read, files), ENTRY])


@pytest.mark.parametrize("name", ["simt", pytest.param("raw", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", TRANSFORMS[1:], ids=str)
def test_the_kernels_steps_are_numpys(settings, dtype, name):
    host = numbers(DTYPES[dtype]).reshape(-1)
    if name == "simt":
        from vpa.backends.simt import RawModule

        module, words = RawModule(text_of(settings, dtype)), host
    else:
        import cupy

        module = cupy.RawModule(code=text_of(settings, dtype), options=("-std=c++17",), backend="nvrtc")
        words = cupy.asarray(host)
    results = words.copy()
    kernel = module.get_function("all_words")
    kernel((-(-len(host) // 256),), (256,), (words, results, np.int64(len(host))))
    assert same(to_host(results), transform.apply(settings, host))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_transformed_arrays_on_a_gpu(dtype):
    """Subnormals included, of any strides; nothing is written to the input."""
    import cupy

    from vpa.scan import apply_transform

    settings = transform.Transform(scale=-0.7, soft_cap=3)
    host = numbers(DTYPES[dtype])
    logits = cupy.asarray(host)
    for view, wanted in ((logits, host), (logits[:, ::2], host[:, ::2]), (logits.T, host.T), (logits[:0], host[:0])):
        assert same(to_host(apply_transform(settings, view)), transform.apply(settings, wanted))
    assert same(to_host(logits), host)
