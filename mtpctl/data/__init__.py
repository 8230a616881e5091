"""What a model is trained on: problems (generated or read from files), the tokenizer, the cursor over them."""

from mtpctl.data.cursor import PromptCursor
from mtpctl.data.files import NO_ANSWER, read_problems
from mtpctl.data.problems import Problem
from mtpctl.data.prompts import encode_prompt, encode_target, fit_problems
from mtpctl.data.sets import ProblemSets, load_problem_sets
from mtpctl.data.tasks import generate
from mtpctl.data.tokenizers import Tokenizer, check_fits_model, load_tokenizer, make_byte_tokenizer

__all__ = [
    "NO_ANSWER",
    "Problem",
    "ProblemSets",
    "PromptCursor",
    "Tokenizer",
    "check_fits_model",
    "encode_prompt",
    "encode_target",
    "fit_problems",
    "generate",
    "load_problem_sets",
    "load_tokenizer",
    "make_byte_tokenizer",
    "read_problems",
]
