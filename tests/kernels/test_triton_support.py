"""Launches by the direct path run the same kernels with the same arguments as Triton's public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

from mtpctl.kernels import activations, grouped, triton_support  # noqa: E402
from mtpctl.kernels.triton_support import TensorDescriptor, launcher  # noqa: E402


class Driver:
    """Compiles for Hopper. Launches are logged instead of run."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.utils = self
        self.device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), object(), 0, 0, 1024

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            x, y, z, stream, function, packed, _launch_metadata, _enter_hook, _exit_hook, *rest = arguments
            self.launches.append((x, y, z, stream, function, packed, rest))

        return run


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    logging = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", logging)
    monkeypatch.setattr(triton_support, "_compiled", {})
    for kernel in (activations.swiglu_kernel, grouped.add_outer_products_kernel):
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    return logging


def test_every_specialization_has_its_own_kernel(driver: Driver) -> None:
    kernel = activations.swiglu_kernel
    x, out, scale = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(4, 32, dtype=torch.bfloat16), torch.empty(9)
    options = {"SCALED": True, "BLOCK": 32}
    calls: list[tuple[int, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = [
        (0, (4,), (x, scale, out, 32), options),
        (0, (2, 3), (x, scale[4:], out, 32), options),
        (0, (4,), (x, scale[1:], out, 32), options),  # a pointer that is not aligned to 16 bytes
        (0, (4,), (x.half(), scale, out.half(), 32), options),
        (0, (4,), (x, scale, out, 33), options),  # not a multiple of 16
        (0, (4,), (x, scale, out, 1), options),  # a constant to Triton
        (0, (4,), (x, scale, out, 1 << 40), options),  # 64 bits
        (0, (4,), (x, scale, out, 32), options | {"BLOCK": 64}),
        (0, (4,), (x, scale, out, 32), options | {"num_warps": 8}),
        (1, (4,), (x, scale, out, 32), options),
    ]
    expected = []
    for driver.device, grid, args, constants in calls:
        kernel[grid](*args, **constants)
        expected.append(driver.launches.pop())
    assert len({launch[4] for launch in expected}) == len(calls) - 1
    for _ in range(2):  # The first launch compiles, the second is direct.
        for (driver.device, grid, args, constants), launch in zip(calls, expected, strict=True):
            launcher(kernel, grid)(*args, **constants)
            actual = driver.launches.pop()
            assert actual[:6] == launch[:6]
            assert all(a is b or a == b for a, b in zip(actual[6], launch[6], strict=True))


def test_tensor_descriptors_are_passed_on(driver: Driver) -> None:
    kernel, ends = grouped.add_outer_products_kernel, torch.empty(2, dtype=torch.int32)
    grad, x, out = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(64, 48, dtype=torch.bfloat16), torch.empty(2, 32, 48)
    functions = []
    for bm in (32, 16, 32, 16):
        descriptors = TensorDescriptor.from_tensor(grad, [16, bm]), TensorDescriptor.from_tensor(x, [16, 16])
        launcher(kernel, (6, 2))(*descriptors, out, ends, out.stride(0), 32, 48, OVERWRITE=True, BM=bm, BN=16, BK=16)
        launch = driver.launches.pop()
        functions.append(launch[4])
        assert launch[:4] == (6, 2, 1, 7) and launch[6][0] is descriptors[0] and launch[6][-4:] == [True, bm, 16, 16]
    assert functions[:2] == functions[2:] and functions[0] != functions[1]
