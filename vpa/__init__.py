"""Vocabulary-parallel argmax: the greedy token of logits split over ranks by vocabulary, without gathering them."""

from vpa import comm
from vpa.calibrate import calibrate
from vpa.captured import CapturedTokens
from vpa.draft import capture_drafts, draft_tokens
from vpa.drafters import validate_local_argmax_reduction
from vpa.emulate import emulate_top_tokens
from vpa.logits import LogitsProcessor, ParallelLMHead
from vpa.pick import pick_from_candidates
from vpa.scan import local_argmax_candidates
from vpa.switch import SwitchTable
from vpa.top_tokens import TopTokens, get_top_tokens
from vpa.transform import Transform
from vpa.vocab import VocabShard, shard_vocab

__version__ = "0.1.0"

__all__ = [
    "CapturedTokens",
    "LogitsProcessor",
    "ParallelLMHead",
    "SwitchTable",
    "TopTokens",
    "Transform",
    "VocabShard",
    "calibrate",
    "capture_drafts",
    "comm",
    "draft_tokens",
    "emulate_top_tokens",
    "get_top_tokens",
    "local_argmax_candidates",
    "pick_from_candidates",
    "shard_vocab",
    "validate_local_argmax_reduction",
]
