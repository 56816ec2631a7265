"""Converts groups to a padded `DataProto` and back, for hooks and reward managers.

    PromptGroup … ──to_data_proto──▶ DataProto ─▶ reward manager, _compute_custom_metrics
    Prompt ──prompt_to_data_proto──▶ DataProto ─▶ _custom_generation_logic ─▶ DataProto ──from_data_proto──▶ Response

    prompts [P]  . . p p p   padded on the left,    responses [R]  r r h r . .   padded on the right; h is a hole:
                             so that both meet                                   seen by the model, not trained on

Everywhere else groups are ragged (`freewheel.data.group`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from freewheel.data.data_proto import TOKEN_COUNTS, DataProto, object_array, plain_copy, tensors_of
from freewheel.data.group import NO_VERSION, Array, Finish, Prompt, PromptGroup, Response, Ticket
from freewheel.errors import DataError

ROW_DEFAULTS: Mapping[str, Any] = {
    "data_source": "",
    "ability": "",
    "reward_model": {},
    "extra_info": {},
    "tools_kwargs": {},
    "interaction_kwargs": {},
}
"""Columns of every batch, with the value for rows that do not set them. verl's code expects them."""


def to_data_proto(groups: Sequence[PromptGroup], *, pad_token_id: int) -> DataProto:
    """Return one row per response, group by group. `uid` identifies the group.

    Additional columns: `rollout_log_probs` and `versions` [R], `token_level_scores` [R] with the reward on the last
    token, and `reward_mask`, 0 for a response whose scoring failed (its score is then 0: do not read it).
    """
    owners = [group for group in groups for _ in range(len(group))]
    responses = [group.response(index) for group in groups for index in range(len(group))]
    if not responses:
        raise DataError("groups = []: a batch needs at least one response")
    lengths = torch.tensor([len(response.tokens) for response in responses])
    width = max(len(group.prompt) for group in groups)
    prompts = torch.full((len(responses), width), pad_token_id, dtype=torch.int64)
    prompt_mask = torch.zeros_like(prompts)
    for row, group in enumerate(owners):
        prompts[row, width - len(group.prompt) :] = torch.from_numpy(np.array(group.prompt, np.int64))
        prompt_mask[row, width - len(group.prompt) :] = 1

    def padded(name: str, fill: float, dtype: torch.dtype) -> torch.Tensor:
        column = torch.full((len(responses), int(lengths.max())), fill, dtype=dtype)
        for row, response in enumerate(responses):
            column[row, : lengths[row]] = torch.from_numpy(np.array(getattr(response, name))).to(dtype)
        return column

    tokens = padded("tokens", pad_token_id, torch.int64)
    seen = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    attention = torch.cat([prompt_mask, seen], dim=1)
    rewards = torch.tensor([response.reward for response in responses], dtype=torch.float32)
    scores = torch.zeros(tokens.shape, dtype=torch.float32)
    scores[torch.arange(len(lengths)), lengths - 1] = rewards.nan_to_num(nan=0.0)
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": tokens,
            "input_ids": torch.cat([prompts, tokens], dim=1),
            "attention_mask": attention,
            "position_ids": _positions(attention),
            "response_mask": padded("mask", 0, torch.int64),
            "rollout_log_probs": padded("logprobs", 0.0, torch.float32),
            "versions": padded("versions", NO_VERSION, torch.int64),
            "token_level_scores": scores,
            "reward_mask": (~rewards.isnan()).long(),
        },
        {
            **_columns([group.row for group in owners], [group.ordinal for group in owners]),
            "finish": object_array(response.finish for response in responses),
            "reward_status": object_array(r.verdict.status if r.verdict else "failed" for r in responses),
        },
        {TOKEN_COUNTS: attention.sum(dim=1).tolist()},
    )


def prompt_to_data_proto(prompt: Prompt, n: int, ordinal: int) -> DataProto:
    """Return a prompt n times, for a generation hook: `prompts`, `input_ids`, `attention_mask`, `position_ids` [P], and
    the columns of its row. `uid` is the ordinal as text."""
    tokens = torch.from_numpy(np.tile(np.asarray(prompt.tokens, np.int64), (n, 1)))
    mask = torch.ones_like(tokens)
    return DataProto.from_dict(
        {"prompts": tokens, "input_ids": tokens.clone(), "attention_mask": mask, "position_ids": _positions(mask)},
        _columns([prompt.row] * n, [ordinal] * n),
        {TOKEN_COUNTS: [len(prompt.tokens)] * n},
    )


def from_data_proto(
    data: DataProto, ticket: Ticket, prompt: Prompt, version: int, *, stop_token_ids: Collection[int] = ()
) -> list[Response]:
    """Return one `Response` per row of a generation hook's result for one prompt.

    Needs `responses`, `rollout_log_probs`, and `response_mask` or `attention_mask`. `versions` has the weight version
    that made each token; without it, all tokens get `version`. A column `finish` says how each response ended. Without
    that column, a response counts as ended if its last token is one of `stop_token_ids`. If there are no such tokens
    either, it counts as ended if it does not fill its row.
    """
    where = f"ordinal {ticket.ordinal}: the result of the generation hook"
    found = {} if data.batch is None else tensors_of(data.batch)
    tensors: dict[str, Array] = {key: value.detach().cpu().numpy() for key, value in found.items()}
    for key in ("responses", "rollout_log_probs"):
        if key not in tensors:
            raise DataError(f"{where} has no {key}: add it to batch; it has {[*tensors]}")
    if not {"response_mask", "attention_mask"} & tensors.keys():
        raise DataError(f"{where} has neither response_mask nor attention_mask: add one; it has {[*tensors]}")
    width = tensors["responses"].shape[1]
    for key in {"rollout_log_probs", "response_mask", "versions"} & tensors.keys():
        if tensors[key].shape != tensors["responses"].shape:
            shapes = f"{list(tensors[key].shape)} for responses {list(tensors['responses'].shape)}"
            raise DataError(f"{where} has a {key} of the shape {shapes}: give one entry per token")
    if "prompts" in tensors:
        _check_prompts(tensors["prompts"], prompt, where)
    # The response's part of an attention mask over prompt and response.
    seen = tensors["attention_mask"][:, -width:] if "attention_mask" in tensors else tensors["response_mask"]
    lengths = [int(np.flatnonzero(row).max(initial=-1)) + 1 for row in seen]
    finishes = data.non_tensor_batch.get("finish")
    responses = []
    for row, count in enumerate(lengths):
        if not count:
            raise DataError(f"{where} has no token in row {row}: a response has at least its end")
        if "attention_mask" in tensors and not seen[row, :count].all():
            raise DataError(f"{where} is not padded on the right in row {row}: attention_mask has gaps in the response")
        columns = {key: tensors[key][row, :count] for key in _RESPONSE_KEYS if key in tensors}
        finish: Any = finishes[row] if finishes is not None else None
        if finish is None:
            ended = columns["responses"][-1] in stop_token_ids if stop_token_ids else count < width
            finish = "stop" if ended else "length"
        elif finish not in ("stop", "length"):
            raise DataError(f"finish = {finish!r}: use 'stop' or 'length'")
        responses.append(_response(columns, version, finish, f"{where}, row {row}"))
    return responses


_RESPONSE_KEYS = ("responses", "rollout_log_probs", "response_mask", "versions")


def _response(columns: Mapping[str, Array], version: int, finish: Finish, where: str) -> Response:
    tokens = columns["responses"]
    made = columns.get("response_mask", np.ones(len(tokens))) != 0
    logprobs = np.where(made, columns["rollout_log_probs"], 0.0).astype(np.float32)
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        wrong = logprobs[~np.isfinite(logprobs) | (logprobs > 0)][0]
        raise DataError(f"{where}: rollout_log_probs holds {wrong}: log-probabilities are finite and at most 0")
    if not made.any():
        raise DataError(f"{where}: response_mask is 0 throughout: at least one token is the policy's")
    versions = np.where(made, columns.get("versions", version), NO_VERSION).astype(np.int32)
    return Response(
        tokens=tokens.astype(np.int32),
        logprobs=logprobs,
        versions=versions,
        mask=made.astype(np.uint8),
        finish=finish,
    )


def _check_prompts(rows: Array, prompt: Prompt, where: str) -> None:
    """Raise if the hook changed the prompts: the policy would be trained on a prompt that it never saw."""
    size = len(prompt.tokens)
    if rows.shape[1] < size or (rows[:, rows.shape[1] - size :] != prompt.tokens).any():
        raise DataError(
            f"{where} has changed the prompts that it received: leave them unchanged, and put additions into responses"
        )


def _columns(rows: Sequence[Mapping[str, Any]], ordinals: Sequence[int]) -> dict[str, Array]:
    """Return the rows' values by key, and `uid`. Each row owns its dicts and lists: a hook may write to them."""
    keys = dict.fromkeys([*ROW_DEFAULTS, *(key for row in rows for key in row)])
    columns = {key: object_array(plain_copy(row.get(key, ROW_DEFAULTS.get(key))) for row in rows) for key in keys}
    columns["index"] = object_array(row.get("index", ordinal) for row, ordinal in zip(rows, ordinals, strict=True))
    return columns | {"uid": object_array(map(str, ordinals))}


def _positions(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
