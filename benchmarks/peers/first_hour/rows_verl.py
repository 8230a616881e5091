# mypy: ignore-errors
# verl: rows as Parquet. Run: python rows_verl.py
import pandas

for source, target in (("rows.jsonl", "train.parquet"), ("held_out.jsonl", "held_out.parquet")):
    rows = pandas.read_json(source, lines=True, dtype=False)
    rows["data_source"] = "chain_sum"
    rows["prompt"] = [[{"role": "user", "content": question}] for question in rows["question"]]
    rows["reward_model"] = [{"style": "rule", "ground_truth": answer} for answer in rows["answer"]]
    rows.to_parquet(target)
