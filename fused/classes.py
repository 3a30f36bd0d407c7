"""The fused kernels as objects that check, compile and run apart, under the names and arguments of `cudnn.csa`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import compiled
from .api import compress_backward, compress_forward
from .checks import INPUTS, Shape, check_backward, check_coff, check_forward, check_layout, check_ratio, require_sized
from .config import Direction
from .streams import StreamLike, call_on

MINIMUM_CAPABILITY = (8, 0)


class _Compressor:
    """What both directions share."""

    _direction: Direction
    _names: tuple[str, ...]  # of the tensors that `execute` takes

    def __init__(self, samples: list[Tensor], ratio: int, coff: int) -> None:
        for name, sample in zip(self._names, samples, strict=True):
            check_layout(name, sample)
        devices = [s.device for s in samples if s.device.type != "meta"]
        self.device = devices[0] if devices else _current_device()
        self.ratio, self.coff = check_ratio(ratio), check_coff(coff)
        self._samples = [_Sample.of(s, self.device) for s in samples]
        self._shape: Shape | None = None
        self._is_compiled = False

    def check_support(self) -> bool:
        """True: tensors like the samples are supported.

        Raises:
            ValueError: they are not; naming the argument, what came and what is needed.
            RuntimeError: the device's compute capability is below 8.0.
        """
        shape = self._check_samples()
        if self.device.type == "cuda" and (found := torch.cuda.get_device_capability(self.device)) < MINIMUM_CAPABILITY:
            raise RuntimeError(f"{self.device}: got compute capability {found}, need {MINIMUM_CAPABILITY} or newer")
        self._shape = shape
        return True

    def compile(self) -> None:
        """Compile for tensors like the samples, `check_support` first if nobody has called it.

        `execute` then compiles nothing, so that it can be captured in a CUDA graph, for tensors that are aligned as
        torch allocates them; for others (views of an odd offset) it compiles at its first call.
        """
        if self._is_compiled:
            return
        if self._shape is None:
            self.check_support()
        assert self._shape is not None
        if self._shape.total_comp:
            exp = compiled.default_exp(self.device)
            memory = [t for t in self._samples if t.dtype != torch.int32]
            config = compiled.configure(self._direction, self.ratio, self.coff, self._shape, exp, self.device, memory)
            compiled.compiled_function(self._direction, config, self.device.index)
        self._is_compiled = True

    def _check_samples(self) -> Shape:
        raise NotImplementedError

    def _check_tensors(self, tensors: tuple[Tensor, ...]) -> None:
        if not self._is_compiled:
            raise ValueError(f"{type(self).__name__}: got execute before compile, need compile first")
        require_sized(**dict(zip(self._names, tensors, strict=True)))
        for name, tensor, sample in zip(self._names, tensors, self._samples, strict=True):
            if tensor.shape != sample.shape:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need {tuple(sample.shape)}, the sample's")
            if tensor.device != sample.device:
                raise ValueError(f"{name}: got device {tensor.device}, need {sample.device}, where the samples are")


class CSACompressorForward(_Compressor):
    """The forward for tensors of one shape.

    Args:
        sample_kv, sample_score, sample_ape, sample_cu_seqlens, sample_cu_seqlens_comp, sample_out: tensors like those
            that `execute` will get; shape, strides, dtype and device are read, and nothing is kept. Those on the meta
            device stand for ones where the others are; if all do, on the current CUDA device, or else on the CPU.
        ratio: 1 to 256.
        coff: 1, or 2 for overlapping windows.
    """

    _direction = "forward"
    _names = (*INPUTS, "out")

    def __init__(
        self,
        sample_kv: Tensor,
        sample_score: Tensor,
        sample_ape: Tensor,
        sample_cu_seqlens: Tensor,
        sample_cu_seqlens_comp: Tensor,
        sample_out: Tensor,
        ratio: int = 4,
        coff: int = 2,
    ) -> None:
        samples = [sample_kv, sample_score, sample_ape, sample_cu_seqlens, sample_cu_seqlens_comp, sample_out]
        super().__init__(samples, ratio, coff)

    def execute(
        self,
        kv: Tensor,
        score: Tensor,
        ape: Tensor,
        cu_seqlens: Tensor,
        cu_seqlens_comp: Tensor,
        out: Tensor,
        current_stream: StreamLike | None = None,
    ) -> None:
        """Write all of `out`, as `compress_forward` does. Allocates nothing, and does not synchronise.

        Args:
            current_stream: where to run, as the wrappers' `stream`.

        Raises:
            ValueError: naming the argument, what came and what is needed; a shape or a device is not the sample's; or
                `compile` was not called.
            RuntimeError: under CUDA graph capture, if these tensors need a kernel that is not compiled yet.
        """
        inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
        self._check_tensors((*inputs, out))

        def launch() -> tuple[()]:
            compress_forward(*inputs, ratio=self.ratio, coff=self.coff, out=out)
            return ()

        call_on(current_stream, (*inputs, out), launch)

    def _check_samples(self) -> Shape:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, out = self._samples
        return check_forward(kv, score, ape, cu_seqlens, cu_seqlens_comp, self.ratio, self.coff, out)


class CSACompressorBackward(_Compressor):
    """The backward for tensors of one shape.

    Args:
        sample_kv, sample_score, sample_ape, sample_cu_seqlens, sample_cu_seqlens_comp, ratio, coff: as in
            `CSACompressorForward`; the gradients are like kv, score and ape.
        sample_out: like grad_out.
        deterministic: without effect: the gradients are the same in every run with either value.
    """

    _direction = "backward"
    _names = (*INPUTS, "grad_out", "grad_kv", "grad_score", "grad_ape")

    def __init__(
        self,
        sample_kv: Tensor,
        sample_score: Tensor,
        sample_ape: Tensor,
        sample_cu_seqlens: Tensor,
        sample_cu_seqlens_comp: Tensor,
        sample_out: Tensor,
        ratio: int = 4,
        coff: int = 2,
        deterministic: bool = False,
    ) -> None:
        samples = [sample_kv, sample_score, sample_ape, sample_cu_seqlens, sample_cu_seqlens_comp, sample_out]
        super().__init__([*samples, sample_kv, sample_score, sample_ape], ratio, coff)

    def scratch_workspace_bytes(self) -> int:
        """0: `execute` asks for no workspace of the caller's, but allocates the one that `compress_backward` names."""
        return 0

    def execute(
        self,
        kv: Tensor,
        score: Tensor,
        ape: Tensor,
        cu_seqlens: Tensor,
        cu_seqlens_comp: Tensor,
        grad_out: Tensor,
        grad_kv: Tensor,
        grad_score: Tensor,
        grad_ape: Tensor,
        current_stream: StreamLike | None = None,
        workspace: Tensor | None = None,
    ) -> None:
        """Write all of the three gradients, as `compress_backward` does, which may come uninitialised.

        Allocates one workspace, and does not synchronise.

        Args:
            current_stream: where to run, as the wrappers' `stream`.
            workspace: not used; see `scratch_workspace_bytes`.

        Raises:
            ValueError, RuntimeError: as `CSACompressorForward.execute`.
        """
        inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
        tensors = (*inputs, grad_kv, grad_score, grad_ape)
        self._check_tensors(tensors)

        def launch() -> tuple[()]:
            compress_backward(
                *inputs,
                ratio=self.ratio,
                coff=self.coff,
                grad_kv=grad_kv,
                grad_score=grad_score,
                grad_ape=grad_ape,
            )
            return ()

        call_on(current_stream, tensors, launch)

    def _check_samples(self) -> Shape:
        kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, *gradients = self._samples
        return check_backward(kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, self.ratio, self.coff, *gradients)


class _Sample(Tensor):
    """What a tensor looks like on a device, without its memory: the address is 0, so as aligned as can be."""

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> Tensor:
        """The sample of `tensor` on its own device, or on `device` if that is meta."""
        sample: Tensor = cls._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=device if tensor.device.type == "meta" else tensor.device,
        )
        return sample

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise TypeError(f"{function}: a sample has no values")


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
