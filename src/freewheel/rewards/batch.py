"""A `DataProto`, verl's or ours, as samples: what a reward manager reads of it, and the tensor that it gives back.

The tensors' own methods are used, so that nothing here imports torch before a batch of tensors comes along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freewheel.errors import ConfigError
from freewheel.rewards.protocol import RewardBatch
from freewheel.rewards.scoring import Array, Sample


class Rollouts:
    """A batch as it was when it was submitted: later changes to its tensors and columns change nothing here.

    What is nested within `extra_info` and in ground truths is the batch's own. Making one does not wait for an
    accelerator; `samples` does.
    """

    def __init__(self, batch: RewardBatch, reward_fn_key: str) -> None:
        tensors, columns = batch.batch, batch.non_tensor_batch
        for key in ("prompts", "responses", "attention_mask"):
            if tensors is None or key not in tensors.keys():  # noqa: SIM118  # a TensorDict has no `in`
                raise ConfigError(f"batch[{key!r}]", None, "a reward manager needs prompts, responses, attention_mask")
        assert tensors is not None
        responses = tensors["responses"]
        self.shape, self.device = tuple(responses.shape), responses.device
        for key in (reward_fn_key, "reward_model"):
            if key not in columns:
                raise ConfigError(f"non_tensor_batch[{key!r}]", None, f"it is missing; there are {', '.join(columns)}")
        for key in (reward_fn_key, "reward_model", "extra_info", "uid"):
            if key in columns and len(columns[key]) != len(self):
                raise ConfigError(
                    f"len(non_tensor_batch[{key!r}])", len(columns[key]), f"the batch has {len(self)} rows"
                )
        self._responses, self._prompts = _snapshot(responses), _snapshot(tensors["prompts"])
        self._mask = _snapshot(tensors["attention_mask"])
        self._arrived = _event_after(responses, tensors["prompts"], tensors["attention_mask"])
        self._sources = [str(source) for source in columns[reward_fn_key]]
        self._truths = [_ground_truth(row, given) for row, given in enumerate(columns["reward_model"])]
        extras = columns["extra_info"] if "extra_info" in columns else [None] * len(self)
        self._extras = [_extra_info(row, given) for row, given in enumerate(extras)]
        wide, tokens = tensors["attention_mask"].shape[1], tensors["prompts"].shape[1] + self.shape[1]
        if wide != tokens:
            raise ConfigError("attention_mask.shape[1]", wide, f"prompts and responses have {tokens} tokens together")
        # Text stands for any uid: a list or an array, which some data has, cannot be looked up.
        uids = [None if uid is None else str(uid) for uid in columns["uid"]] if "uid" in columns else []
        self._uids = uids if any(uid is not None for uid in uids) else None
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return int(self.shape[0])

    def samples(self, tokenizer: Any) -> list[Sample]:
        """Decodes every row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        split = self._mask.shape[1] - self.shape[1]
        valid = self._mask != 0  # a mask may be of floats, and its sum would be one
        self._lengths = valid[:, split:].sum(dim=1).tolist()
        prompt_lengths = valid[:, :split].sum(dim=1).tolist()
        # Without uids nothing says which rows answer one prompt; equal prompts do.
        groups: list[Any] = self._uids or [tuple(row) for row in self._prompts.tolist()]
        groups = [(row,) if group is None else group for row, group in enumerate(groups)]  # no uid: a group of its own

        def decode(tokens: Any) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=True))

        def question(row: int) -> str:
            told = self._extras[row].get("question")
            if isinstance(told, str):
                return told
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
        """Each row's reward on its last valid token; on the first where a response is empty. The rest is 0."""
        import torch

        placed = torch.zeros(self.shape, dtype=torch.float32)
        if placed.numel():
            last = torch.tensor(self._lengths).clamp(min=1) - 1
            placed[torch.arange(len(self)), last] = torch.as_tensor(rewards, dtype=torch.float32)
        return placed.to(self.device)


def _snapshot(tensor: Any) -> Any:
    """A copy on the CPU. From an accelerator it arrives later: the copy takes its turn behind the work queued there."""
    if not tensor.is_cuda:
        return tensor.detach().clone().cpu()
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def _event_after(*tensors: Any) -> Any:
    """An event behind the copies queued so far; None where they are done."""
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
