"""Drafters: both arms draft the tokens of the family's own rule, and a hook that forgets a part drafts others."""

from __future__ import annotations

import dataclasses
import functools
import logging

import numpy as np
import pytest
from oracle import DTYPES
from safetensors.numpy import save_file
from test_logits import SHARDINGS, TPS

import vpa
from vpa import LogitsProcessor, ParallelLMHead, VocabShard, draft_tokens, drafters, shard_vocab
from vpa.backends import numpy_
from vpa.drafters import FAMILIES, DeepSeekMTP, DeepSeekV32MTP, DraftSettings, NemotronHMTP, seeded_drafter
from vpa.mtp import NAMES, Block, MTPLayer, rms_norm

SIZES = {"hidden_size": 32, "intermediate_size": 48}
VOCABULARIES = {name: SHARDINGS[name] for name in ("500 in 512", "32001", "129280", "1010 and 16 added")}


@functools.lru_cache(maxsize=4)
def drafter_of(family: str, vocab: str = "500 in 512", tp: int = 4, layers: int = 2, **settings):
    processor = LogitsProcessor(**settings)
    return seeded_drafter(family, VOCABULARIES[vocab](tp), processor, num_layers=layers, seed=1, **SIZES)


def inputs(rows: int, drafter, seed: int = 0, hidden_size: int = 32):
    """Hidden states, last tokens, and positions, the first of which is 0."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((rows, hidden_size)).astype(drafter.embedding.dtype)
    return hidden, rng.integers(0, len(drafter.embedding), rows), np.arange(rows) % 5


def by_rule(family: str, drafter, hidden, token_ids, positions, count: int) -> np.ndarray:
    """Drafts as docs/semantics.md says it for each family, from the layers' parts and the argmax of whole rows."""
    drafts = []
    for step in range(count):
        if family == "nemotron-h":
            layer, head = drafter.layer, drafter.lm_head
        else:
            number = drafter.start_layer + step % len(drafter.layers)
            layer, head = drafter.layers[number], drafter.heads[number]
        embedding = drafter.embedding[token_ids].copy()
        if family != "nemotron-h":
            embedding[positions == 0] = 0
        pre_norm = layer(embedding, hidden)
        hidden = rms_norm(pre_norm, layer.final_norm, layer.eps)  # all families: what the head takes, and the next step
        whole = drafter.logits_processor.compute_logits(head, hidden)
        token_ids = whole.astype(np.float32).argmax(axis=1)
        positions = positions + 1
        drafts.append(token_ids)
    return np.stack(drafts, axis=1)


def arms(drafter, hidden, token_ids, positions, count: int = 4) -> list[np.ndarray]:
    """Drafts by the local argmax and by the full gather."""
    return [
        draft_tokens(drafter, hidden, count, token_ids=token_ids, positions=positions, use_local_argmax_reduction=local)
        for local in (True, False)
    ]


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_arms_draft_what_the_rule_says(family, vocab, tp):
    drafter = drafter_of(family, vocab, tp)
    count = 2 if vocab == "129280" else 7 if family == "nemotron-h" else 3
    for rows in (1, 16, 128):
        given = inputs(rows, drafter)
        local, full = arms(drafter, *given, count)
        assert local.dtype == np.int64 and local.shape == (rows, count)
        assert np.array_equal(local, full)
        assert np.array_equal(local, by_rule(family, drafter, *given, count))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [{"scale": -0.5}, {"scale": 0}, {"soft_cap": 0.5}, {"scale": 3, "soft_cap": 30}])
@pytest.mark.parametrize("family", FAMILIES)
def test_scale_and_soft_cap(family, settings, dtype):
    drafter = seeded_drafter(family, shard_vocab(500, 4), LogitsProcessor(**settings), dtype=dtype, **SIZES)
    given = inputs(16, drafter)
    local, full = arms(drafter, *given)
    assert np.array_equal(local, full) and np.array_equal(local, by_rule(family, drafter, *given, 4))


def test_the_cut_of_the_vocabulary_changes_no_weight():
    """Nor, as products of few numbers are mostly summed alike, many tokens: the drafts of 1 and 8 ranks are close."""
    one, eight = (drafter_of("deepseek", "500 in 512", tp) for tp in (1, 8))
    assert np.array_equal(one.embedding, eight.embedding)
    given = inputs(64, one)
    assert (arms(one, *given)[0] == arms(eight, *given)[0]).mean() > 0.9


class Forgetful(LogitsProcessor):
    """A processor whose hook forgets some of the settings that its full path keeps."""

    def get_top_tokens(self, head, hidden):
        return LogitsProcessor(**self.kept()).get_top_tokens(head, hidden)

    def kept(self) -> dict:
        return {}


class TestWrongHooks:
    """Each forgets one thing, raises nothing, and is found out: its drafts are other than those of the full path."""

    @staticmethod
    def assert_found_out(right, wrong, rows: int = 16):
        given = inputs(rows, right)
        local, full = arms(right, *given)
        assert np.array_equal(local, full)
        mutant, its_full = arms(wrong, *given)
        assert np.array_equal(its_full, full), "the full path is the right one"
        assert not np.array_equal(mutant, full)

    @staticmethod
    def remade(kind: type, drafter):
        fields = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
        return kind(**fields)

    def test_the_norm_is_dropped(self):
        class NoNorm(DeepSeekMTP):
            def get_top_tokens(self, hidden, step=0):
                return self.logits_processor.get_top_tokens(self.head_of(step), hidden)

        right = drafter_of("deepseek")
        self.assert_found_out(right, self.remade(NoNorm, right))

    @pytest.mark.parametrize("family", ["nemotron-h", "deepseek-v3.2"])
    def test_a_norm_is_added_to_a_head_only_family(self, family):
        right = drafter_of(family)
        layer = right.layer if family == "nemotron-h" else right.layers[right.start_layer]

        class Normed(type(right)):
            def get_top_tokens(self, hidden, step=0):
                return super().get_top_tokens(layer.normed(hidden), step)

        self.assert_found_out(right, self.remade(Normed, right))

    def test_the_norm_matters_by_its_gain_alone(self):
        """A gain of ones rescales each row, which changes no argmax: such a test would let the wrong hook pass."""
        gains, rows = np.ones(4, np.float32), np.array([[2, 1, 1, 0]], np.float32)
        head = ParallelLMHead(np.eye(4, dtype=np.float32), VocabShard.even(4, 1))
        processor = LogitsProcessor()
        assert processor.get_top_tokens(head, rows).tolist() == [0]
        assert processor.get_top_tokens(head, rms_norm(rows, gains, 0)).tolist() == [0]
        gains = np.array([1, 3, 1, 0.1], np.float32)
        assert processor.get_top_tokens(head, rms_norm(rows, gains, 0)).tolist() == [1]

    @pytest.mark.parametrize(
        ("settings", "kept"),
        [
            ({"scale": -2}, {}),
            ({"scale": 0}, {}),
            ({"scale": -2, "soft_cap": 0.25}, {"scale": -2}),
            ({"soft_cap": 0.25}, {}),
            ({"draft_to_target": np.arange(500) // 3, "target_vocab_size": 700}, {}),
        ],
        ids=["scale below 0", "scale of 0", "soft-cap behind a scale", "soft-cap", "map"],
    )
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_setting_is_dropped(self, family, settings, kept, monkeypatch):
        monkeypatch.setattr(Forgetful, "kept", lambda self: kept)
        shards = shard_vocab(500, 4)
        right, wrong = (
            seeded_drafter(family, shards, kind(**settings), seed=1, **SIZES) for kind in (LogitsProcessor, Forgetful)
        )
        self.assert_found_out(right, wrong)

    @pytest.mark.parametrize("padding", [0.0, np.inf, np.nan])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_padding_bound_is_dropped(self, family, padding, monkeypatch):
        """All logits below zero, as a scale below zero of positive products makes them, so that even zeros win."""
        right = seeded_drafter(family, shard_vocab(500, 4), LogitsProcessor(soft_cap=30), seed=1, **SIZES)
        heads = [right.lm_head] if family == "nemotron-h" else right.heads.values()
        for one in [one for ranks in heads for one in ranks]:
            bias = np.full(one.shard.width, -30, one.weight.dtype)
            bias[one.shard.ids() < 0] = 0
            weight = one.weight.copy()
            weight[one.shard.ids() < 0] = padding
            rebuilt = ParallelLMHead(weight, one.shards, one.rank, bias)
            for field in ("weight", "bias", "_linear"):
                object.__setattr__(one, field, getattr(rebuilt, field))
        given = inputs(16, right)
        local, full = arms(right, *given)
        assert np.array_equal(local, full) and full.max() < 500

        def unbounded(shard, splits):
            last = shard.ranges[-1]
            ranges = (*shard.ranges[:-1], (last[0], shard.width - last[0], last[2]))
            wide = dataclasses.replace(shard, vocab_size=shard.vocab_size + shard.width, ranges=ranges)
            return bounded(wide, splits)

        bounded = numpy_.equal_runs
        monkeypatch.setattr(numpy_, "equal_runs", unbounded)
        hidden, token_ids, positions = given
        for_head, _ = right.forward(token_ids, positions, hidden, 0)
        assert (right.get_top_tokens(for_head, 0) >= 500).any()

    def test_the_two_hidden_states_are_swapped(self):
        """Both arms are wrong alike: only the family's rule tells."""

        class Swapped(DeepSeekMTP):
            def forward(self, *arguments):
                return super().forward(*arguments)[::-1]

        right = drafter_of("deepseek")
        wrong, given = self.remade(Swapped, right), inputs(16, right)
        mutants = arms(wrong, *given)
        assert np.array_equal(*mutants)
        assert not np.array_equal(mutants[0], by_rule("deepseek", right, *given, 4))

    @pytest.mark.parametrize("family", ["deepseek", "deepseek-v3.2"])
    def test_the_step_or_the_mask_is_forgotten(self, family):
        right = drafter_of(family)
        given = inputs(16, right)
        expected = by_rule(family, right, *given, 4)

        class FirstHead(type(right)):
            def head_of(self, step=0):
                return self.heads[self.start_layer]

        assert np.array_equal(arms(right, *given)[0], expected)
        assert not np.array_equal(arms(self.remade(FirstHead, right), *given)[0], expected)
        hidden, token_ids, positions = given
        assert not np.array_equal(arms(right, hidden, token_ids, positions + 1)[0], expected)


class TestLoop:
    def test_defaults(self):
        """The first token is what the head gives for the hidden states, and no token stands at position 0."""
        drafter = drafter_of("nemotron-h")
        hidden, _, _ = inputs(5, drafter)
        first = drafter.get_top_tokens(hidden)
        expected = draft_tokens(drafter, hidden, 3, token_ids=first, positions=np.full(5, 7))
        assert np.array_equal(draft_tokens(drafter, hidden, 3), expected)
        assert np.array_equal(draft_tokens(drafter, hidden, 3, use_local_argmax_reduction=False), expected)

    @pytest.mark.parametrize(("rows", "count"), [(0, 3), (3, 0), (0, 0)])
    def test_nothing_to_draft(self, rows, count):
        drafter = drafter_of("deepseek")
        drafts = draft_tokens(drafter, inputs(rows, drafter)[0], count)
        assert drafts.shape == (rows, count) and drafts.dtype == np.int64

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"hidden": np.zeros((2, 31), np.float32)}, ValueError, "hidden has 31 columns; the drafter takes 32"),
            ({"hidden": np.zeros(32, np.float32)}, ValueError, r"hidden has shape \(32,\)"),
            ({"hidden": "h"}, TypeError, "hidden is a builtins.str"),
            ({"num_draft_tokens": -1}, ValueError, "num_draft_tokens is -1; it is at least 0"),
            ({"num_draft_tokens": 1.5}, TypeError, "num_draft_tokens is 1.5; an integer"),
            ({"token_ids": np.zeros(3, np.int64)}, ValueError, r"token_ids is int64\[3\]; int64\[2\] is accepted"),
            ({"token_ids": np.zeros(2, np.int32)}, ValueError, r"token_ids is int32\[2\]; int64\[2\]"),
            ({"token_ids": np.array([0, 500])}, ValueError, "token_ids has 500; 0 to 499 are accepted"),
            ({"token_ids": np.array([0, -1])}, ValueError, "token_ids has -1; 0 to 499"),
            ({"positions": np.array([0, -1])}, ValueError, "positions has -1; 0 and above are accepted"),
        ],
    )
    def test_arguments_that_do_not_fit(self, change, error, message):
        arguments = {"hidden": np.zeros((2, 32), np.float32), "num_draft_tokens": 2, **change}
        with pytest.raises(error, match=message):
            draft_tokens(
                drafter_of("nemotron-h"), arguments.pop("hidden"), arguments.pop("num_draft_tokens"), **arguments
            )


class TestPattern:
    def test_layers(self):
        assert drafters.parse_mtp_pattern("*E") == ("attention", "MoE")
        assert drafters.parse_mtp_pattern("EE*") == ("MoE", "MoE", "attention")

    @pytest.mark.parametrize(
        ("pattern", "message"),
        [
            ("*M", r"pattern '\*M' has 'M' at place 1; an MTP step has '\*' \(attention\) and 'E' \(MoE\), no other"),
            ("-E", "has '-' at place 0"),
            ("*e", "has 'e' at place 1"),
            ("", "pattern is ''; a text of"),
            (None, "pattern is None; a text of"),
        ],
    )
    def test_refused(self, pattern, message):
        with pytest.raises(ValueError, match=message):
            drafters.parse_mtp_pattern(pattern)

    @pytest.mark.parametrize(("pattern", "blocks"), [("*", 0), ("E*E", 2)])
    def test_one_block_for_each_expert_layer(self, pattern, blocks):
        right = drafter_of("nemotron-h")
        layer = MTPLayer.seeded(0, blocks=blocks, **SIZES)
        drafter = dataclasses.replace(right, pattern=pattern, layer=layer)
        local, full = arms(drafter, *inputs(4, drafter))
        assert np.array_equal(local, full)
        with pytest.raises(ValueError, match=f"has {blocks} MoE layers, the layer 1 blocks"):
            dataclasses.replace(right, pattern=pattern)


class TestValidation:
    def test_a_class_without_the_hook_is_named(self):
        class OldDrafter:
            def compute_logits(self, hidden, step=0):
                return None

        with pytest.raises(ValueError, match=r"needs OldDrafter.get_top_tokens\(hidden, step\), which the class lacks"):
            vpa.validate_local_argmax_reduction(OldDrafter())

    def test_a_hook_that_another_class_wrote_for_its_own_logits(self):
        class Scaled(NemotronHMTP):
            def compute_logits(self, hidden, step=0):
                return super().compute_logits(hidden, step) * 2

        right = drafter_of("nemotron-h")
        drafter = TestWrongHooks.remade(Scaled, right)
        with pytest.raises(
            ValueError, match="Scaled has a compute_logits of its own and inherits get_top_tokens from Flat"
        ):
            vpa.validate_local_argmax_reduction(drafter)

        class Both(Scaled):
            def get_top_tokens(self, hidden, step=0):
                return super().get_top_tokens(hidden, step)

        vpa.validate_local_argmax_reduction(TestWrongHooks.remade(Both, right))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_one_line_is_logged(self, family, caplog):
        drafter = drafter_of(family)
        with caplog.at_level(logging.INFO, "vpa"):
            vpa.validate_local_argmax_reduction(drafter)
        (record,) = caplog.records
        assert record.getMessage() == (
            f"rank 0: local argmax reduction in use for the drafts of {type(drafter).__name__}, communication O(ranks) "
            f"instead of O(vocabulary): about 256 bytes a row instead of 1024"
        )

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"temperature": 0.7}, "drafts are sampled at temperature 0.7"),
            ({"temperature": 1e-5}, "drafts are sampled at temperature 1e-05"),
            ({"tokens_per_position": 4}, "4 tokens are drafted for a position"),
            ({"draft_logits_needed": True}, "draft logits are needed"),
            ({"lora_on_head": True}, "a LoRA adapts the head"),
            ({"request_logits_processing": True}, "requests change draft logits"),
        ],
    )
    def test_other_settings_are_refused_with_their_reason(self, settings, reason, caplog):
        drafter = drafter_of("nemotron-h")
        with caplog.at_level(logging.INFO, "vpa"), pytest.raises(ValueError, match=f"with NemotronHMTP: {reason}"):
            vpa.validate_local_argmax_reduction(drafter, DraftSettings(**settings))
        assert not caplog.records
        vpa.validate_local_argmax_reduction(drafter, DraftSettings(temperature=9e-6))

    def test_what_is_no_setting(self):
        with pytest.raises(TypeError, match="settings is a dict; a DraftSettings"):
            vpa.validate_local_argmax_reduction(drafter_of("nemotron-h"), {})


class TestParts:
    def test_a_layer_from_a_file(self, tmp_path):
        layer = MTPLayer.seeded(3, **SIZES)
        (block,) = layer.blocks
        tensors = {
            "token_norm": layer.token_norm, "hidden_norm": layer.hidden_norm, "projection": layer.projection.weight,
            "mlp_norm": block.norm, "gate": block.gate.weight, "up": block.up.weight, "down": block.down.weight,
            "final_norm": layer.final_norm,
        }  # fmt: skip
        path = str(tmp_path / "mtp.safetensors")
        save_file({f"model.layers.61.{NAMES[field]}": array for field, array in tensors.items()}, path)
        loaded = MTPLayer.load(path, "model.layers.61.")
        embedding, hidden = (np.random.default_rng(i).standard_normal((4, 32)).astype(np.float32) for i in (0, 1))
        assert np.array_equal(loaded(embedding, hidden), layer(embedding, hidden))
        assert np.array_equal(loaded.normed(hidden), layer.normed(hidden))
        assert MTPLayer.load(path, "model.layers.61.", dtype="float32")(embedding, hidden).dtype == np.float32
        with pytest.raises(ValueError, match=r"has no tensor 'enorm.weight'; it has model.layers.61"):
            MTPLayer.load(path)
        with pytest.raises(ValueError, match="names has no down, final_norm, gate"):
            MTPLayer.load(path, names={})

    def test_the_norm(self):
        rows = np.random.default_rng(0).standard_normal((5, 33))
        gain = np.random.default_rng(1).standard_normal(33)
        exact = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-6) * gain
        got = rms_norm(rows.astype(np.float32), gain.astype(np.float32), 1e-6)
        assert got.dtype == np.float32 and np.allclose(got, exact, rtol=1e-6)

    def test_the_block(self):
        layer = MTPLayer.seeded(0, dtype="float32", **SIZES)
        (block,) = layer.blocks
        x = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
        normed = rms_norm(x, block.norm, 1e-6).astype(np.float64)
        gate, up, down = (part.weight.astype(np.float64) for part in (block.gate, block.up, block.down))
        silu = normed @ gate.T / (1 + np.exp(-(normed @ gate.T)))
        assert np.allclose(block(x, 1e-6), x + (silu * (normed @ up.T)) @ down.T, rtol=1e-4, atol=1e-5)

    def test_what_does_not_fit(self):
        layer = MTPLayer.seeded(0, **SIZES)
        with pytest.raises(ValueError, match=r"final_norm is bfloat16\[31\]; with a projection of bfloat16\[32, 64\]"):
            dataclasses.replace(layer, final_norm=layer.final_norm[:31])
        with pytest.raises(ValueError, match=r"token_norm is float32\[32\]; .* it is bfloat16\[32\]"):
            dataclasses.replace(layer, token_norm=layer.token_norm.astype(np.float32))
        block = layer.blocks[0]
        wrong = Block(block.norm, block.gate, block.down, block.down)
        with pytest.raises(ValueError, match=r"blocks\[0\].up is bfloat16\[32, 48\]; .* it is bfloat16\[48, 32\]"):
            dataclasses.replace(layer, blocks=(wrong,))

    def test_drafters_whose_parts_do_not_fit(self):
        right, deep = drafter_of("nemotron-h"), drafter_of("deepseek")
        with pytest.raises(ValueError, match="layer 0 has hidden size 16, the embedding 32"):
            dataclasses.replace(right, layer=MTPLayer.seeded(0, hidden_size=16, intermediate_size=8))
        with pytest.raises(ValueError, match="head 0 drafts 500 ids; the embedding has 499 rows"):
            dataclasses.replace(right, embedding=right.embedding[:499])
        with pytest.raises(TypeError, match="logits_processor is a NoneType"):
            dataclasses.replace(right, logits_processor=None)
        with pytest.raises(
            ValueError, match=r"layers \[61, 62\] and heads \[61\]; both are numbered from start_layer 61"
        ):
            dataclasses.replace(deep, heads={61: deep.heads[61]})
        with pytest.raises(ValueError, match="numbered from start_layer 0 on"):
            dataclasses.replace(deep, start_layer=0)

    def test_families(self):
        assert isinstance(drafter_of("deepseek-v3.2"), DeepSeekV32MTP)
        with pytest.raises(ValueError, match=r"family is 'eagle'; nemotron-h, deepseek, deepseek-v3.2 are accepted"):
            seeded_drafter("eagle", VocabShard.even(4, 1), LogitsProcessor())
