"""Tensors seen through the windows of a `Problem`: gather what a row pools, scatter gradients back.

A row's window has `window = coff * ratio` entries in the order of `Problem.row_window`: with coff 2 the overlap
(first-half columns of the previous block) comes first. `rows` always selects rows of the output; without it, all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import Problem

ALL = slice(None)


def gather(tensor: Tensor, problem: Problem, fill: float, rows: slice = ALL) -> Tensor:
    """The windows of kv or score, (n, window, head_dim), in the dtype of `tensor`; differentiable.

    `fill` stands in the entries that are invalid, the overlap of a segment's first block. Padding rows pool
    token 0 on, as a first block.
    """
    own = _own_tokens(problem, rows, tensor.device)
    if problem.coff == 1:
        return tensor[own]
    previous = (own - problem.ratio).clamp(min=0)  # negative only where the entry is invalid anyway
    overlap = tensor[:, : problem.head_dim][previous]
    windows = torch.cat((overlap, tensor[:, problem.head_dim :][own]), dim=1)
    return windows.masked_fill(~valid(problem, tensor.device, rows), fill)


def logits(score: Tensor, ape: Tensor, problem: Problem, rows: slice = ALL, *, fill: float = -torch.inf) -> Tensor:
    """score + ape over the windows, (n, window, head_dim), in the wider of the two dtypes; differentiable.

    Invalid entries are `fill` whatever ape holds there, NaN included.
    """
    summed = gather(score, problem, 0.0, rows) + gather_ape(ape, problem)
    return summed if problem.coff == 1 else summed.masked_fill(~valid(problem, score.device, rows), fill)


def gather_ape(ape: Tensor, problem: Problem) -> Tensor:
    """ape (ratio, coff * head_dim) as every row's window sees it: (window, head_dim)."""
    return ape if problem.coff == 1 else torch.cat((ape[:, : problem.head_dim], ape[:, problem.head_dim :]))


def scatter_ape(windows: Tensor, problem: Problem) -> Tensor:
    """The inverse of `gather_ape`: (window, head_dim) to (ratio, coff * head_dim)."""
    return windows if problem.coff == 1 else torch.cat((windows[: problem.ratio], windows[problem.ratio :]), dim=1)


def valid(problem: Problem, device: torch.device | str, rows: slice = ALL) -> Tensor:
    """Which window entries hold a token, (n, window, 1), bool: all but the overlap of first blocks."""
    first = torch.from_numpy(problem.row_is_first[rows].copy()).to(device)
    mask = torch.ones((len(first), problem.window, 1), dtype=torch.bool, device=device)
    if problem.coff == 2:
        mask[:, : problem.ratio] = ~first[:, None, None]
    return mask


def scatter(windows: Tensor, problem: Problem, into: Tensor, rows: slice = ALL) -> None:
    """Write windows (n, window, head_dim) to the slots of `into`, (total_tokens, coff * head_dim), that feed them.

    Padding rows and invalid entries are dropped; each other slot belongs to one window alone, so this is no sum.
    Slots that no row consumes are left as they are.
    """
    start, stop, _ = rows.indices(problem.total_comp)
    rows = slice(start, max(start, min(stop, problem.rows)))
    own = _own_tokens(problem, rows, into.device)
    windows = windows[: len(own)]
    into[:, -problem.head_dim :][own] = windows[:, -problem.ratio :]
    if problem.coff == 2:
        later = torch.from_numpy(~problem.row_is_first[rows]).to(into.device)
        into[:, : problem.head_dim][own[later] - problem.ratio] = windows[later, : problem.ratio]


def _own_tokens(problem: Problem, rows: slice, device: torch.device) -> Tensor:
    """Tokens of each row's own block, (n, ratio), int64."""
    first = torch.from_numpy(problem.row_token[rows].copy()).to(device)
    return first[:, None] + torch.arange(problem.ratio, device=device)
