# mypy: ignore-errors
# TRL: work B on one GPU, without values that equal defaults. Run: python sums_trl.py
from datasets import load_dataset
from peer_reward import value
from trl import GRPOConfig, GRPOTrainer


def score(completions, answer, **others):
    return [value(messages[-1]["content"], each) for messages, each in zip(completions, answer, strict=True)]


rows = load_dataset("json", data_files={"train": "rows.jsonl", "held_out": "held_out.jsonl"})
rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
settings = GRPOConfig(
    model_init_kwargs={"attn_implementation": "flash_attention_2", "dtype": "float32"},
    max_completion_length=160,
    epsilon_high=0.28,
    delta=3.0,
    learning_rate=3e-5,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=20,
    adam_beta2=0.95,
    max_steps=800,
    per_device_train_batch_size=64,
    steps_per_generation=4,
    gradient_checkpointing=False,
    use_liger_kernel=True,
    use_vllm=True,
    vllm_max_model_length=256,
    eval_strategy="steps",
    eval_steps=80,
    eval_on_start=True,
    per_device_eval_batch_size=256,
    num_generations_eval=1,
    save_strategy="no",
)
trainer = GRPOTrainer(
    model="MODEL",
    args=settings,
    reward_funcs=score,
    train_dataset=rows["train"],
    eval_dataset=rows["held_out"],
)
trainer.train()
