"""Batch normalization over the batches of all ranks.

The rules:
  1. The result, and the input's gradient for the sum of all ranks' losses, are those of `torch.nn.BatchNorm` on the
     rows of all ranks together. Gradients of weight and bias are this rank's part; the optimizer combines them.
  2. The forward pass makes one all-gather: the number of values of every rank, their means and variances. Each rank
     merges them in float64 and in the same order, so all ranks normalize alike. The backward pass makes one all-reduce.
  3. Messages are named by the number of channels: layers of one width take turns under one name, which the engine
     caches. So all ranks must run their layers in the same order, as the same model does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ronde.engine.process import ProcessSet, global_process_set
from ronde.torch.call import Call, size_of
from ronde.torch.tensors import start_dense
from ronde.types import Kind

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch normalization of inputs [rows, channels, ...] whose statistics are those of all ranks' batches.

    Ranks may have different numbers of rows, and none. Inputs of 16 bits are computed in float32. In evaluation with
    running statistics, and where only one rank takes part, nothing is sent.

    Args:
        num_features: The number of channels, the second dimension of the inputs.
        eps: Added to the variance (1e-5).
        momentum: The weight of a batch in the running statistics (0.1); None: their mean over all batches.
        affine: Whether the module learns a factor and an offset for each channel (true).
        track_running_stats: Whether it keeps running statistics for evaluation (true).
        process_set: The ranks that take part (all).

    Raises:
        ValueError: From `forward`: an input has the wrong shape, this rank is not one of the process set in training,
            or, on all ranks, they have less than two values per channel together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet | None = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        # None for the set of all ranks: a process that loads a pickled module has another object for it.
        self._process_set = None if process_set is global_process_set else process_set

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, not {input.dim()}")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected an input of {self.num_features} channels, not {input.size(1)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input, and update the running statistics in training.

        All ranks call their layers in the same order.

        Args:
            input: a tensor of at least 2 dimensions: batch, channels, and any others.

        Raises:
            ValueError: the input has another number of channels, or too few values per channel on all ranks together.
        """
        self._check_input_dim(input)
        is_local = not self.training and self.running_mean is not None
        if is_local or size_of(self._process_set) == 1:
            return super().forward(input)
        moments = _moments_of_all(input, self._process_set)
        if self.training and self.track_running_stats:
            self._update_running_statistics(moments)
        return _Normalize.apply(input, self.weight, self.bias, moments, self.eps, self._process_set)

    def _update_running_statistics(self, moments: _Moments) -> None:
        """Move the running statistics toward those of this batch."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        # With momentum None, the running statistics are the plain means of all batches so far.
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = moments.variance * (moments.values / (moments.values - 1))
        with torch.no_grad():
            for running, latest in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
                running.lerp_(latest.to(running), weight)


class _Moments(NamedTuple):
    """The number of values per channel on all ranks, their mean and (biased) variance, as float64 in main memory."""

    values: float
    mean: Any
    variance: Any


def _moments_of_all(input: Any, process_set: ProcessSet | None) -> _Moments:
    with torch.no_grad():
        channels = input.size(1)
        wide = input.detach().to(_wide_type(input))
        count = wide.numel() // max(channels, 1)
        variance, mean = torch.var_mean(wide, _others(input), correction=0)
        mine = torch.cat([mean, variance]).to("cpu").double()
        if count == 0:
            mine.zero_()  # the mean of no values is NaN
        message = torch.cat([torch.tensor([float(count)], dtype=torch.float64), mine])[None]
        name = f"sync_batch_norm.{channels}.moments"
        gathered = start_dense(Call(Kind.allgather, name, process_set, waits=True), message).wait()
        counts, means, variances = gathered[:, :1], gathered[:, 1 : channels + 1], gathered[:, channels + 1 :]
        total = float(counts.sum())
        if total < 2:
            raise ValueError(
                f"expected at least 2 values per channel on all ranks together when training, not {total:g}"
            )
        mean = (counts * means).sum(0) / total
        squares = counts * (variances + (means - mean).square())
        return _Moments(total, mean, squares.sum(0) / total)


class _Normalize(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        input: Any,
        weight: Any,
        bias: Any,
        moments: _Moments,
        eps: float,
        process_set: ProcessSet | None,
    ) -> Any:
        wide = _wide_type(input)
        mean = moments.mean.to(input.device, wide)
        deviation = (moments.variance + eps).rsqrt().to(input.device, wide)  # the reciprocal of the deviation
        ctx.save_for_backward(input, weight, mean, deviation)
        ctx.count, ctx.parameters, ctx.process_set = moments.values, (weight, bias), process_set
        scale = deviation if weight is None else deviation * weight.to(wide)
        result = (input.to(wide) - _by_channel(mean, input)) * _by_channel(scale, input)
        if bias is not None:
            result += _by_channel(bias.to(wide), input)
        return result.to(input.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        input, weight, mean, deviation = ctx.saved_tensors
        wide, axes = mean.dtype, _others(input)
        gradient = gradient.to(wide)
        normal = (input.to(wide) - _by_channel(mean, input)) * _by_channel(deviation, input)
        of_bias = gradient.sum(axes)
        of_weight = (gradient * normal).sum(axes)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = _sum_of_all(torch.cat([of_bias, of_weight]), ctx.process_set) / ctx.count
            of_mean, of_deviation = sums.to(input.device, wide).split(input.size(1))
            scale = deviation if weight is None else deviation * weight.to(wide)
            of_input = gradient - _by_channel(of_mean, input) - normal * _by_channel(of_deviation, input)
            of_input = (of_input * _by_channel(scale, input)).to(input.dtype)
        of_parameters = [
            it.to(parameter.dtype) if parameter is not None and is_wanted else None
            for it, parameter, is_wanted in zip(
                (of_weight, of_bias), ctx.parameters, ctx.needs_input_grad[1:3]
            )
        ]
        return of_input, *of_parameters, None, None, None


def _sum_of_all(sums: Any, process_set: ProcessSet | None) -> Any:
    message = sums.to("cpu").double()
    name = f"sync_batch_norm.{len(sums) // 2}.gradients"
    return start_dense(Call(Kind.allreduce, name, process_set, in_place=True, waits=True), message).wait()


def _wide_type(input: Any) -> Any:
    """Return the type to compute in."""
    return torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype


def _others(input: Any) -> list[int]:
    """Return all axes except that of the channels."""
    return [axis for axis in range(input.dim()) if axis != 1]


def _by_channel(values: Any, input: Any) -> Any:
    """Return one value per channel, in a shape that broadcasts to the input."""
    return values.view(1, -1, *[1] * (input.dim() - 2))
