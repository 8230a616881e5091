# mypy: ignore-errors
from peer_reward import value


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return value(solution_str, ground_truth)
