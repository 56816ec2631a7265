#!/usr/bin/env bash
# GRPO on GSM8K with verl 0.9.1, scored by verl's rule, an LLM judge and a length penalty around each group's median.
#
#   OPENAI_API_KEY=sk-… JUDGE_URL=https://api.openai.com/v1/chat/completions JUDGE_MODEL=gpt-4o-mini ./run_grpo.sh
#   OPENAI_API_KEY=EMPTY JUDGE_URL=http://127.0.0.1:8000/v1/chat/completions JUDGE_MODEL=my-judge ./run_grpo.sh
#
# Further arguments are verl's: ./run_grpo.sh trainer.n_gpus_per_node=8
#
# Needs: pip install 'freewheel[verl]' and vLLM; GSM8K as verl prepares it (its examples/data_preprocess/gsm8k.py) in
# $DATA. On several nodes, export OPENAI_API_KEY before `ray start` on each: verl prints its configuration, so the key
# stays out of it.
set -euo pipefail

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
JUDGE_URL=${JUDGE_URL:?where the judge is: a chat-completions URL}
JUDGE_MODEL=${JUDGE_MODEL:?the name of the judge, as its endpoint knows it}
: "${OPENAI_API_KEY:?the key for it (EMPTY for a server without keys)}"

# What freewheel adds: the manager and its settings. A judge's 1 to 10 becomes 0.1 to 1, next to a rule's 0 or 1.
FREEWHEEL=(
  reward.reward_manager.source=importlib
  reward.reward_manager.module.path=pkg://freewheel.integrations.verl
  reward.reward_manager.name=FreewheelRewardManager
  "+reward.reward_kwargs.length_penalty_config.api_endpoint=$JUDGE_URL"
  "+reward.reward_kwargs.length_penalty_config.model_name=$JUDGE_MODEL"
  +reward.reward_kwargs.length_penalty_config.reward_coefficient=0.1
  +reward.reward_kwargs.length_penalty_config.penalty_scale=0.5
)

exec "$PYTHON" -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=128 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  trainer.n_gpus_per_node=1 \
  trainer.nnodes=1 \
  trainer.logger=[console] \
  trainer.project_name=freewheel \
  trainer.experiment_name=gsm8k-grpo \
  trainer.save_freq=-1 \
  trainer.test_freq=10 \
  trainer.val_before_train=False \
  trainer.total_epochs=1 \
  "${FREEWHEEL[@]}" \
  "$@"
