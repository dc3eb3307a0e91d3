# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: tensors that say they are on ``cuda:0`` and are computed on the CPU.

What is checked is the discipline of devices: an operator that meets tensors of both devices raises,
as CUDA does; so does ``numpy()``; and what is copied, on which stream, and who waits for what is
written to a list. Numbers are those of the CPU. Kernels of Triton are left out: operators run in
plain torch. Threads have no emulated GPU, which is a mode of torch's and of one thread.

To autograd these tensors are on torch's device "meta", whose backward runs in the calling thread.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphshard.comm import collectives
from graphshard.ops import _dispatch

GPU = torch.device("cuda", 0)
_META = torch.device("meta")
_CPU = torch.device("cpu")


class OnGpu(Tensor):
    """A tensor of the emulated GPU; ``numbers`` is it on the CPU."""

    @staticmethod
    def __new__(cls, numbers: Tensor, requires_grad: bool = False) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=_META,
            requires_grad=requires_grad,
        )
        made.numbers = numbers
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def record_stream(self, stream: Any) -> None:
        stream.log.append(("marked for", stream.name))

    def __repr__(self, **kwargs: Any) -> str:
        return f"OnGpu({self.numbers})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator on the CPU, its result on the device that it belongs to."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_gpu = [isinstance(tensor, OnGpu) for tensor in tensors]
    is_copy = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
    if any(on_gpu) and not all(on_gpu) and not is_copy:
        strangers = [t for t, there in zip(tensors, on_gpu, strict=True) if not there and t.dim()]
        # A scalar of the CPU may meet tensors of a GPU; indices of the CPU may, in torch.
        indexes = func.__name__.startswith("index.") and on_gpu[0]
        if strangers and not indexes:
            raise RuntimeError(
                f"{func} expected all tensors to be on the same device, but found at least two "
                "devices, cuda:0 and cpu!"
            )
    result_on_gpu = isinstance(tensors[0], OnGpu) if is_copy else any(on_gpu)
    if kwargs.get("device") is not None:
        result_on_gpu = torch.device(kwargs["device"]).type != "cpu"
        kwargs = {**kwargs, "device": _CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    plain_args, plain_kwargs = pytree.tree_map(_numbers, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    known = {id(t.numbers): t for t in tensors if isinstance(t, OnGpu)}

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return OnGpu(value) if result_on_gpu else value

    return pytree.tree_map(placed, out)


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, OnGpu) else value


class _Factories(TorchDispatchMode):
    """Operators whose arguments hold no tensor of the GPU yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Names(TorchFunctionMode):
    """What a program calls cuda is meta to torch; page-locked memory is noted and is plain."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if kwargs.pop("pin_memory", False):
            size = args if isinstance(args[0], int) else args[0]
            self._log.append(("page-locked", tuple(size)))
        if func in (Tensor.pin_memory, Tensor.is_pinned):
            self._log.append((func.__name__, tuple(args[0].shape)))
            return args[0].clone() if func is Tensor.pin_memory else False
        if func in _IN_AUTOCAST and torch.is_autocast_enabled("cuda"):
            args, kwargs = pytree.tree_map(_autocast, (args, kwargs))
        if kwargs.get("non_blocking"):
            self._log.append(("copy", torch.cuda.current_stream().name))
        args, kwargs = pytree.tree_map(_renamed, (args, kwargs))
        if kwargs.get("device") == "meta":
            kwargs["device"] = _META
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _META:
            del kwargs["device"]  # torch would fill it where no operator is seen
            return func(*args, **kwargs).to(_META)
        return func(*args, **kwargs)


_IN_AUTOCAST = {
    functional.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum,
    Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.__matmul__, Tensor.__rmatmul__,
}  # fmt: skip
"""What autocast computes in the narrower type; torch does not for tensors on "meta"."""


def _autocast(value: Any) -> Any:
    narrow = isinstance(value, OnGpu) and value.dtype == torch.float32
    return value.to(torch.get_autocast_dtype("cuda")) if narrow else value


def _renamed(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return _META
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "meta"
    return value


class _Stream:
    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: _Stream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: _Event) -> None:
        self.log.append((self.name, "waits for an event of", event.stream.name))

    def record_event(self) -> _Event:
        return _Event(self)

    def is_capturing(self) -> bool:
        return False


class _Event:
    def __init__(self, stream: _Stream | None = None, **options: bool) -> None:
        self.stream = stream or _Stream([], "none")

    def record(self, stream: _Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        return 0.0

    def synchronize(self) -> None:
        self.stream.log.append(("host waits for", self.stream.name))


@contextmanager
def emulated_gpu(count: int = 1) -> Iterator[list[Any]]:
    """This thread has a GPU (and says that there are ``count``); gives the list of what it did."""
    log: list[Any] = []
    streams = [_Stream(log, "main")]
    state = torch.arange(16, dtype=torch.uint8)
    set_states: list[Tensor] = []

    @contextmanager
    def on_stream(stream: _Stream) -> Iterator[None]:
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "set_device": lambda device: log.append(("set_device", str(device))),
        "get_device_properties": lambda device: types.SimpleNamespace(
            uuid=f"GPU-{device}", major=9
        ),
        "current_stream": lambda device=None: streams[-1],
        "is_current_stream_capturing": lambda: False,
        "default_stream": lambda device=None: streams[0],
        "Event": _Event,
        "Stream": lambda device=None: _Stream(log, "copies"),
        "stream": on_stream,
        "get_rng_state": lambda device=None: (set_states or [state])[-1].clone(),
        "set_rng_state": lambda new, device=None: set_states.append(new.clone()),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 123 << 20,
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (8 << 30, 16 << 30),
    }
    with ExitStack() as stack:
        for name, function in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        current = names["current_stream"]
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", current))
        collectives._copy_stream.cache_clear()
        stack.callback(collectives._copy_stream.cache_clear)
        stack.enter_context(mock.patch.object(_dispatch, "_load_triton", return_value=None))
        stack.enter_context(
            mock.patch.object(torch.backends.cudnn, "is_acceptable", return_value=False)
        )
        renames = _Names(log)
        stack.enter_context(renames)
        stack.enter_context(_Factories())
        make_subclass = Tensor._make_subclass

        # Its arguments have the names that torch's compiler looks for.
        def subclass(cls: Any, data: Any, requires_grad: Any = False, **kwargs: Any) -> Any:
            """Of a tensor of the GPU: one without numbers, of a class that keeps its own."""
            if isinstance(data, OnGpu):
                with _disable_current_modes():
                    like = data.size(), data.stride()
                    data = torch.empty_strided(*like, dtype=data.dtype, device=_META)
            return make_subclass(cls, data, requires_grad, **kwargs)

        stack.enter_context(mock.patch.object(Tensor, "_make_subclass", subclass))
        run_backward = torch.autograd._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            with renames:  # a mode is off while it calls a function, such as Tensor.backward
                return run_backward(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", backward))
        yield log
