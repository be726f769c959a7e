"""Checks inside the host: the sampler's widgets, progress, cancelling and memory."""

import gc

import numpy as np
import torch
from checks_common import drawn, encoded, graph, loaded, previews_whatever_they_take, ready, refused, replaced


def check_every_widget_does_something(inside):
    model, positive, _ = ready(inside)
    base = {"method": "sjd", "temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg": 1.0, "seed": 11}

    def codes(**widgets):
        return drawn(inside, model, positive, **{**base, **widgets})[0].codes

    reference = codes()
    assert (codes() == reference).all()
    changes = {"seed": 12, "temperature": 0.3, "top_k": 2, "top_p": 0.2, "cfg": 6.0, "window": 3,
               "draft_start": "left", "method": "scd-maximal"}
    for name, value in changes.items():
        assert (codes(**{name: value}) != reference).any(), name
    assert codes(frames=3).shape == (1, 3, 8, 8)
    assert codes(frames=1, width=0, height=0).shape == (1, 1, 16, 16)
    pair = codes(batch_size=2)
    assert pair.shape[0] == 2 and (pair[0] == reference[0]).all() and (pair[1] != pair[0]).any()


def check_minus_one_is_the_models_own(inside):
    model, positive, _ = ready(inside)
    own = model.family.defaults
    spelled = {name: getattr(own, name) for name in ("temperature", "top_k", "top_p", "cfg")}
    first, second = drawn(inside, model, positive), drawn(inside, model, positive, **spelled)
    assert (first[0].codes == second[0].codes).all()
    assert f"temperature {own.temperature}, top-k {own.top_k}" in first[1]


def check_seed_exact_equals_autoregressive(inside):
    """Window, draft start and memory change the passes, never the tokens."""
    model, positive, _ = ready(inside)
    reference = drawn(inside, model, positive, method="autoregressive", seed=2)[0].codes
    for widgets in ({"window": 5}, {"window": 0}, {"draft_start": "above"}, {"memory": False}, {"preview": "auto"}):
        tokens = drawn(inside, model, positive, seed=2, **widgets)[0]
        assert (tokens.codes == reference).all(), widgets
    passes = {memory: drawn(inside, model, positive, seed=2, memory=memory, window=64)[1].split(" passes")[0]
              for memory in (True, False)}
    assert passes[True] != passes[False]


def check_negative_acts_with_guidance_only(inside):
    model, text, _ = loaded(inside)
    positive, negative = encoded(inside, text), encoded(inside, text, "red car")
    for cfg, equal in ((1.0, True), (4.0, False)):
        with_negative = drawn(inside, model, positive, negative=negative, cfg=cfg)[0].codes
        assert bool((with_negative == drawn(inside, model, positive, cfg=cfg)[0].codes).all()) is equal


def check_prompt_acts_and_unknown_words_are_told(inside):
    model, text, _ = loaded(inside)
    first = drawn(inside, model, encoded(inside, text, "red car"), cfg=6.0)[0].codes
    assert (first != drawn(inside, model, encoded(inside, text, "green frog"), cfg=6.0)[0].codes).any()
    made = inside.call("SCD_TextEncode", ar_text=text, text="a fox on blarg")
    assert "'blarg'" in made.ui.as_dict()["text"][0]
    assert "'blarg'" in drawn(inside, model, made.args[0])[1]
    assert inside.call("SCD_TextEncode", ar_text=text, text="a fox").ui is None


def check_what_cannot_be_drawn_is_told_in_a_sentence(inside):
    model, positive, _ = ready(inside)
    wrong = ({"width": 100, "height": 100}, {"frames": 500}, {"temperature": -0.5}, {"top_p": -0.5},
             {"method": "warp"}, {"draft_start": "nowhere"}, {"seed": 1 << 64}, {"batch_size": 0})
    for widgets in wrong:
        with refused():
            drawn(inside, model, positive, **widgets)
    with refused("64x64"):
        drawn(inside, model, positive, width=100, height=100)


def check_seeds_of_64_bits(inside):
    model, positive, _ = ready(inside)
    made = [drawn(inside, model, positive, seed=seed, batch_size=2)[0].codes
            for seed in (0, (1 << 32) - 1, 1 << 32, (1 << 64) - 1)]
    assert len({codes.numpy().tobytes() for codes in made}) == 4


def check_report_names_the_window_and_the_map_has_its_shape(inside):
    model, positive, _ = ready(inside)
    tokens, report, heat = drawn(inside, model, positive, window=0, batch_size=2)
    assert "window 0" not in report and "window " in report
    assert heat.shape[0] == 2 and min(heat.shape[1:3]) >= 256 and heat.shape[3] == 3
    assert heat.dtype == torch.float32 and heat.min() >= 0 and heat.max() <= 1
    assert tokens.codes.shape == (2, 2, 8, 8)


def check_nobodys_random_state_is_touched(inside):
    model, positive, vq = ready(inside)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    tokens = drawn(inside, model, positive, preview="auto")[0]
    inside.call("SCD_VQDecode", tokens=tokens, vq=vq)
    assert (torch.get_rng_state() == states[0]).all() and (np.random.get_state()[1] == states[1]).all()


def cut(tokens):
    """The same tokens without their last column."""
    return type(tokens)(tokens.codes[..., :-1], 32, 32, tokens.vocab, tokens.model, tokens.family)


def check_kept_tokens_stay(inside):
    model, positive, _ = ready(inside)
    tokens = drawn(inside, model, positive, seed=1)[0]
    again, report, _ = drawn(inside, model, positive, seed=2, kept=tokens)
    assert (again.codes == tokens.codes).all() and "0 tokens in 0 passes" in report
    half = torch.zeros_like(tokens.codes, dtype=torch.bool)
    half[:, :, :4] = True
    part = type(tokens)(tokens.codes, 32, 32, tokens.vocab, tokens.model, tokens.family, kept=half)
    mixed = drawn(inside, model, positive, seed=2, kept=part)[0].codes
    assert (mixed[half] == tokens.codes[half]).all() and (mixed != tokens.codes).any()
    longer = drawn(inside, model, positive, seed=2, kept=tokens, frames=4)[0].codes
    assert longer.shape[1] == 4 and (longer[:, :2] == tokens.codes).all()
    pair = drawn(inside, model, positive, seed=2, kept=part, batch_size=2)[0].codes
    assert (pair[0] == mixed[0]).all() and (pair[1] != mixed[0]).any()
    for word, widgets in {"grid": {"frames": 2, "width": 0, "height": 0, "kept": cut(tokens)},
                          "frames": {"frames": 1, "width": 0, "height": 0, "kept": tokens}}.items():
        with refused(word):
            drawn(inside, model, positive, **widgets)


def check_progress_counts_tokens(inside):
    model, positive, _ = ready(inside)
    inside.progress.clear()
    with previews_whatever_they_take(inside):
        report = drawn(inside, model, positive, preview="auto", batch_size=2)[1]
    values = [value for value, _, _ in inside.progress]
    assert values == sorted(values) and values[-1] == 256 and {total for _, total, _ in inside.progress} == {256}
    assert len(values) == int(report.split(" tokens in ")[1].split()[0])
    assert any(picture for *_, picture in inside.progress)
    inside.progress.clear()
    drawn(inside, model, positive, preview="off")
    assert not any(picture for *_, picture in inside.progress)


def check_a_broken_preview_costs_no_run(inside):
    model, positive, _ = ready(inside)
    before = drawn(inside, model, positive)[0].codes

    def fail(codes):
        raise RuntimeError("no picture today")

    model.codec.net.decode = fail
    try:
        assert (drawn(inside, model, positive, preview="auto")[0].codes == before).all()
    finally:
        del model.codec.net.decode


def large_tensors():
    """Bytes of all tensors that are alive, weights included."""
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == "cpu")


def check_cancel_stops_within_a_pass_and_frees_memory(inside):
    inside.run(graph(seed=20, method="autoregressive"))
    model = ready(inside)[0]
    undisturbed, alive = [], large_tensors()

    def stop(value, total):
        if value >= 5 and total > 100:
            inside.mm.interrupt_current_processing(True)

    for seed in (21, 22, 23):
        inside.on_progress = stop
        inside.run(graph(seed=seed, method="autoregressive"))
        assert inside.outcome()[0] == "execution_interrupted"
        assert max(value for value, _, _ in inside.progress) < 7
        inside.on_progress = None
    assert large_tensors() <= alive * 1.01
    positive = ready(inside)[1]
    for _ in range(2):
        undisturbed.append(drawn(inside, model, positive, seed=24)[0].codes)
    assert (undisturbed[0] == undisturbed[1]).all()


def check_out_of_memory_reaches_the_host_and_leaves_nothing(inside):
    model, positive, _ = ready(inside)
    before = drawn(inside, model, positive, seed=30)[0].codes
    calls = []

    def fail(*_, **__):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return type(model.net).logits(model.net, *_, **__)

    alive = large_tensors()
    model.net.logits = fail
    try:
        with refused("no room", torch.OutOfMemoryError):
            drawn(inside, model, positive, seed=30)
    finally:
        del model.net.logits
    assert large_tensors() <= alive * 1.01
    assert (drawn(inside, model, positive, seed=30)[0].codes == before).all()


def check_impossible_size_is_refused_with_numbers(inside):
    model, positive, _ = ready(inside)
    with replaced(inside.mm, "get_total_memory", lambda *_: 1 << 20), refused("GB"):
        drawn(inside, model, positive, batch_size=64)
