"""A `DataProto`, verl's or freewheel's, as samples: what a reward manager reads from it, and the tensor it returns.

    RewardBatch ─▶ Rollouts: a snapshot ─▶ samples(tokenizer) ─▶ … rewards … ─▶ tensor(rewards)

Only methods of the batch's own tensors are used, so importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from freewheel.errors import ConfigError
from freewheel.rewards.scoring import Array, Sample

_TENSORS = ("prompts", "responses", "attention_mask")


@runtime_checkable
class RewardBatch(Protocol):
    """A batch to be scored. Reward managers read it and never change it."""

    @property
    def batch(self) -> Any:
        """A `TensorDict` or a dict with `prompts`, `responses`, `attention_mask` and so on; None without tensors."""

    @property
    def non_tensor_batch(self) -> Mapping[str, Array]:
        """`data_source`, `reward_model`, `uid` and so on, with one entry per sample."""

    @property
    def meta_info(self) -> Mapping[str, Any]:
        """Facts about the batch as a whole."""

    def __len__(self) -> int: ...


class Rollouts:
    """A snapshot of a batch: later changes to its tensors and columns do not change it.

    Objects nested in `extra_info` and in ground truths are not copied. Making a snapshot does not wait for an
    accelerator; `samples` does.
    """

    def __init__(self, batch: RewardBatch, reward_fn_key: str) -> None:
        tensors, columns = batch.batch, batch.non_tensor_batch
        for key in _TENSORS:
            if tensors is None or key not in tensors.keys():  # noqa: SIM118  # a TensorDict has no `in`
                raise ConfigError(f"batch[{key!r}]", None, f"a reward manager needs {', '.join(_TENSORS)}")
        responses = tensors["responses"]
        self._shape, self._device = tuple(responses.shape), responses.device
        for key in (reward_fn_key, "reward_model", "extra_info", "uid"):
            if key not in columns:
                if key in ("extra_info", "uid"):
                    continue
                raise ConfigError(f"non_tensor_batch[{key!r}]", None, f"it is missing; there are {', '.join(columns)}")
            if len(columns[key]) != len(self):
                raise ConfigError(
                    f"len(non_tensor_batch[{key!r}])", len(columns[key]), f"the batch has {len(self)} rows"
                )
        wide, tokens = tensors["attention_mask"].shape[1], tensors["prompts"].shape[1] + self._shape[1]
        if wide != tokens:
            raise ConfigError("attention_mask.shape[1]", wide, f"prompts and responses have {tokens} tokens together")
        self._prompts, self._responses, self._mask = (_snapshot(tensors[key]) for key in _TENSORS)
        self._arrived = _event_after(*(tensors[key] for key in _TENSORS))
        self._sources = [str(source) for source in columns[reward_fn_key]]
        self._truths = [_ground_truth(row, given) for row, given in enumerate(columns["reward_model"])]
        extras = columns["extra_info"] if "extra_info" in columns else [None] * len(self)
        self._extras = [_extra_info(row, given) for row, given in enumerate(extras)]
        # As text, because some data has lists or arrays as uids, which cannot be looked up.
        uids = [None if uid is None else str(uid) for uid in columns["uid"]] if "uid" in columns else []
        self._uids = uids if any(uid is not None for uid in uids) else None
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return int(self._shape[0])

    def samples(self, tokenizer: Any) -> list[Sample]:
        """Decode every row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        split = self._mask.shape[1] - self._shape[1]
        valid = self._mask != 0  # a mask may hold floats, and then its sum would be one too
        self._lengths = valid[:, split:].sum(dim=1).tolist()
        prompt_lengths = valid[:, :split].sum(dim=1).tolist()
        # Without uids, rows with equal prompts are a group. If other rows have a uid, a row without one is a separate
        # group.
        groups: list[Any] = self._uids or [tuple(row) for row in self._prompts.tolist()]
        groups = [(row,) if group is None else group for row, group in enumerate(groups)]

        def decode(tokens: Any) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=True))

        def question(row: int) -> str:
            found = self._extras[row].get("question")
            if isinstance(found, str):
                return found
            padded = self._prompts[row]
            return decode(padded[len(padded) - prompt_lengths[row] :])

        return [
            Sample(
                response=decode(self._responses[row][:length]),
                length=length,
                group=groups[row],
                data_source=self._sources[row],
                ground_truth=self._truths[row],
                question=question(row),
                extra_info=self._extras[row],
            )
            for row, length in enumerate(self._lengths)
        ]

    def tensor(self, rewards: Array) -> Any:
        """Return a tensor with each reward on its row's last valid token (the first if the response is empty)."""
        import torch

        placed = torch.zeros(self._shape, dtype=torch.float32)
        if placed.numel():
            last = torch.tensor(self._lengths).clamp(min=1) - 1
            placed[torch.arange(len(self)), last] = torch.as_tensor(rewards, dtype=torch.float32)
        return placed.to(self._device)


def _snapshot(tensor: Any) -> Any:
    """Return a copy on the CPU. A copy from an accelerator is queued there and arrives later."""
    if not tensor.is_cuda:
        return tensor.detach().clone().cpu()
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def _event_after(*tensors: Any) -> Any:
    """Return a CUDA event after the copies queued so far; None if all tensors are on the CPU."""
    on_cuda = [tensor for tensor in tensors if tensor.is_cuda]
    if not on_cuda:
        return None
    import torch

    return torch.cuda.current_stream(on_cuda[0].device).record_event()


def _extra_info(row: int, given: Any) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"extra_info[{row}]", given, "give a mapping, or None")
    return dict(given or {})


def _ground_truth(row: int, given: Any) -> Any:
    if not isinstance(given, Mapping) or "ground_truth" not in given:
        raise ConfigError(f"reward_model[{row}]", given, "give a mapping with ground_truth")
    return given["ground_truth"]
