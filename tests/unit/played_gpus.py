"""A machine with GPUs, played on the CPU, to see that no operation mixes two of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU = torch.device("cpu")


def place_of(tensor: Tensor) -> torch.device:
    """Return the device that a tensor would lie on."""
    return getattr(tensor, "place", CPU)


def place(value: Any, device: torch.device) -> Any:
    """Say of every tensor in a value that it lies on a device; return the value."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            leaf.place = device  # type: ignore[attr-defined]
    return value


def _device_in(values: Iterable[Any]) -> torch.device | None:
    """Return the device among the arguments of a function, if there is one."""
    for value in values:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
            return torch.device(value)
    return None


class PlayedGpus(TorchFunctionMode):
    """Values stay on the CPU; each tensor says which device it lies on, and functions keep to it.

    As on a real machine, a function whose tensors lie on two devices raises, save for copies, for
    indices and for single numbers on the CPU; and numpy reads tensors of the CPU alone.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return place_of(args[0])
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return place_of(args[0]).type == "cuda"
        if func in (Tensor.to, Tensor.cpu):
            return self._move(func, args, kwargs)
        if func is Tensor.copy_:
            return place(func(*args, **kwargs), place_of(args[0]))
        if func is Tensor.numpy and place_of(args[0]) != CPU:
            raise AssertionError("numpy cannot read a tensor of a GPU")
        asked = _device_in([kwargs.pop("device", None)])
        found = self._common_device(func, args, kwargs)
        return place(func(*args, **kwargs), asked or found)

    @staticmethod
    def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor, *rest = args
        device = CPU if func is Tensor.cpu else _device_in([*rest, *kwargs.values()])
        if device is None:  # of another dtype, or as another tensor is
            like = [value for value in rest if isinstance(value, Tensor)]
            device = place_of(like[0] if like else tensor)
        kept = tree_map_only((torch.device, str), lambda _: CPU, (rest, kwargs))
        moved = func(tensor, *kept[0], **kept[1])
        if device != place_of(tensor) and moved is tensor:
            moved = tensor.detach().clone()
        moved.place = device
        return moved

    @staticmethod
    def _common_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        indexes = func in (Tensor.__getitem__, Tensor.__setitem__)
        values = tree_leaves((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        gpus = {place_of(tensor) for tensor in tensors} - {CPU}
        if not gpus:
            return CPU
        on_cpu = [t for t in tensors if place_of(t) == CPU and t.dim() > 0]
        if len(gpus) > 1 or (on_cpu and not (indexes and place_of(args[0]) != CPU)):
            places = sorted({str(place_of(tensor)) for tensor in tensors})
            raise AssertionError(f"{func.__name__} of tensors on {', '.join(places)}")
        return gpus.pop()
