#!/bin/sh
# verl: work B on one GPU, without values that equal defaults. Run after rows_verl.py: sh sums_verl.sh
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
    data.train_files=train.parquet \
    data.val_files=held_out.parquet \
    data.train_batch_size=32 \
    data.max_prompt_length=96 \
    data.max_response_length=160 \
    reward.custom_reward_function.path=reward_verl.py \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.bypass_mode=True \
    actor_rollout_ref.model.path=MODEL \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.optim.lr=3e-5 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=20 \
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    trainer.test_freq=20 \
    trainer.logger=[console] \
    trainer.n_gpus_per_node=1 \
    trainer.total_training_steps=200
