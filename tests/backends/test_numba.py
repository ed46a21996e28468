"""What the Numba backend keeps between calls, with GPUs and kernels that are made up."""

from __future__ import annotations

import types

import pytest


@pytest.fixture
def gpus(monkeypatch):
    """CuPy's and Numba's current GPU, which the test sets and reads; a kernel's configuration says on which."""
    pytest.importorskip("cupy")
    pytest.importorskip("numba.cuda")
    from vpa.backends import numba_

    state = types.SimpleNamespace(cupy=0, numba=0, capability=(9, 0), ready=numba_._ready)
    runtime = types.SimpleNamespace(getDevice=lambda: state.cupy)
    stream = types.SimpleNamespace(ptr=0)
    monkeypatch.setattr(
        numba_,
        "cupy",
        types.SimpleNamespace(
            cuda=types.SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream),
            ndarray=types.SimpleNamespace,
        ),
    )
    monkeypatch.setattr(
        numba_,
        "cuda",
        types.SimpleNamespace(
            get_current_device=lambda: types.SimpleNamespace(id=state.numba, compute_capability=state.capability),
            select_device=lambda device: setattr(state, "numba", device),
            external_stream=lambda pointer: pointer,
        ),
    )
    numba_._configured.cache_clear()
    state.kernel = type("Kernel", (), {"__getitem__": lambda self, key: (state.numba, *key)})()
    yield state
    numba_._configured.cache_clear()


def test_a_kernel_is_configured_on_each_gpu_and_run_there(gpus):
    """Back on the first GPU, too, where the configuration is found and Numba's GPU is still the second."""
    for device in (0, 1, 0, 1):
        gpus.cupy = device
        assert gpus.ready(gpus.kernel, 8, 32) == (device, 8, 32, 0)
        assert gpus.numba == device


def test_a_gpu_without_the_instructions_is_refused(gpus):
    gpus.capability = (7, 5)
    with pytest.raises(
        RuntimeError, match=r"device 0 has compute capability 7\.5; backend 'numba' takes 8\.0 and above"
    ):
        gpus.ready(gpus.kernel, 8, 32)


def test_a_prepared_launch_takes_the_addresses_of_other_arrays(gpus):
    from vpa.backends import launches, numba_

    calls = []
    kernel = type("Kernel", (), {"__getitem__": lambda self, key: lambda *arguments: calls.append((key, arguments))})()
    arrays = [types.SimpleNamespace(data=types.SimpleNamespace(ptr=address)) for address in (16, 32, 48, 64)]
    launch = launches.Launch("local_argmax_candidates", {}, 8, 32, ())
    prepared = numba_.Prepared(kernel, launch, (arrays[0], 7, ((0, 5, 0),), arrays[1]))
    prepared()
    prepared(*arrays[2:])
    assert calls == [((8, 32, 0), (16, 7, ((0, 5, 0),), 32)), ((8, 32, 0), (48, 7, ((0, 5, 0),), 64))]
