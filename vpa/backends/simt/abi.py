"""The structures of state.h as ctypes sees them: one launch, its memory regions and its report."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p

DONE, PAUSED, FAULT = 0, 1, 2
GLOBAL, STATIC_SHARED, DYNAMIC_SHARED, VARIABLE = 1, 2, 3, 4  # Space
WRITE, ATOMIC, VOLATILE = 1, 2, 4  # Access flags
PERMIT_READ, PERMIT_WRITE = 1, 2
SHARED_LIMIT = 227 * 1024  # of a block, on any GPU so far
STATIC_SHARED_LIMIT = {32: 48 * 1024, 64: 64 * 1024}  # by warp size
MAX_CLUSTER = 16
DYNAMIC_BYTES = 256 * 1024  # kept for it, whatever a launch asks for


class Region(ctypes.Structure):
    _fields_ = [
        ("low", c_uint64),
        ("size", c_uint64),
        ("space", c_uint32),
        ("permit", c_uint32),
        ("permissions", c_void_p),
        ("cells", c_void_p),
        ("shift", c_uint32),
        ("base", c_uint32),
        ("index", c_uint32),
        ("pad", c_uint32),
    ]


class Actor(ctypes.Structure):
    _fields_ = [
        ("block", c_uint64),
        ("thread", c_uint32),
        ("flags", c_uint32),
        ("doing", c_char_p),
        ("frame_count", c_uint32),
        ("pad", c_uint32),
        ("frames", c_uint64 * 24),
    ]


class Report(ctypes.Structure):
    _fields_ = [
        ("fault", c_uint32),
        ("space", c_uint32),
        ("address", c_uint64),
        ("size", c_uint64),
        ("has_other", c_uint32),
        ("line", c_uint32),
        ("column", c_uint32),
        ("owner", c_uint32),
        ("file", c_char_p),
        ("actor", Actor),
        ("other", Actor),
        ("text", c_char * 256),
    ]


COMPARE_SITES = ctypes.CFUNCTYPE(c_int32, ctypes.POINTER(Actor), ctypes.POINTER(Actor))


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("warp_size", c_uint32),
        ("region_count", c_uint32),
        ("call", c_void_p),
        ("arguments", c_void_p),
        ("order", c_void_p),
        ("regions", c_void_p),
        ("slice_ms", c_uint32),
        ("resident_blocks", c_uint32),
        ("shuffles_order_memory", c_uint32),
        ("cluster", c_uint32 * 3),
        ("shared_low", c_int64),
        ("dynamic_low", c_int64),
        ("image_low", c_int64),
        ("image_size", c_uint64),
        ("constant_low", c_uint64),
        ("constant_high", c_uint64),
        ("pool", c_void_p),
        ("compare_sites", COMPARE_SITES),
        ("report", Report),
    ]


class Parameter(ctypes.Structure):
    """simt_parameter of prelude_launch.h."""

    _fields_ = [
        ("size", c_uint32),
        ("align", c_uint32),
        ("kind", c_char),
        ("pointee_kind", c_char),
        ("pointee_const", c_uint8),
        ("pad", c_uint8),
        ("pointee_size", c_uint32),
        ("text", c_char_p),
    ]


class KernelEntry(ctypes.Structure):
    """simt_kernel of prelude_launch.h."""

    _fields_ = [
        ("name", c_char_p),
        ("names", c_char_p),
        ("call", c_void_p),
        ("parameters", ctypes.POINTER(Parameter)),
        ("count", c_uint32),
        ("max_threads", c_uint32),
        ("cluster", c_uint32 * 3),
    ]
