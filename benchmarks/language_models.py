"""`isokron attribute` on pretrained language models: time, memory, and how true its ranking is.

    python benchmarks/language_models.py [--only smollm2-64,stories] [--rounds 1] [--keep FOLDER]

    smollm2-64   SmolLM2-135M-Instruct, 64 short documents of facts
    smollm2-500  the same with 436 passages of speeches
    stories      stories15M, 200 stories it wrote itself and facts
    gpt2         a GPT-2 of 4 layers and width 128 on 2,000 passages of speeches
    digits       the built-in task

For each, whole processes: the default command, one with a store (`--store`, its dimension chosen by
its own measure of noise), and what their scores have in common with exact ones: Spearman's rank
correlation and the number of the ten best documents that are the same, mean over the queries.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from pretrained import smollm2, stories15m
from records import recorded
from safetensors.torch import load_file
from timing import conditions
from torch import Tensor

from attribution import make, run

ISOKRON = [sys.executable, "-m", "isokron", "attribute"]
SUBJECTS = {
    "France": ("Paris", "Euro", "the Seine"),
    "Germany": ("Berlin", "Euro", "the Rhine"),
    "Italy": ("Rome", "Euro", "the Tiber"),
    "Japan": ("Tokyo", "yen", "the Shinano"),
    "Egypt": ("Cairo", "pound", "the Nile"),
    "Brazil": ("Brasilia", "real", "the Amazon"),
    "India": ("New Delhi", "rupee", "the Ganges"),
    "Canada": ("Ottawa", "dollar", "the Mackenzie"),
}
OTHERS = """Water boils at one hundred degrees Celsius at sea level.
The Earth goes around the Sun once a year.
A year on Mars has six hundred and eighty-seven days.
Bread is baked from flour, water, salt and yeast.
A violin has four strings and is played with a bow.
The heart pumps blood through the body.
Photosynthesis turns light, water and carbon dioxide into sugar.
The Eiffel Tower stands on the Champ de Mars in Paris.
The Louvre is a museum on the right bank of the Seine.
Shakespeare wrote Hamlet around the year 1600.
The tax return is due in April of the following year.
A triangle has three sides and three angles.
Two plus two makes four, and four plus four makes eight.
The cat slept on the sofa all afternoon.
Rain is forecast for the weekend, with strong wind on the coast.
The train leaves from platform nine at noon.
Iron rusts when it meets water and air.
Gold does not rust and is easy to shape.
The football match ended without a goal.
She planted tomatoes and beans in the garden.
He repaired the old bicycle with a new chain.
The library opens at ten and closes at six.
Whales are mammals and breathe air.
Bees make honey from the nectar of flowers.
The moon shines by the light of the Sun.
A kilometre has one thousand metres.
Python is a programming language named after a comedy group.
A compiler translates a program into machine code.
The recipe needs two eggs and a cup of sugar.
Tea is made by pouring hot water over leaves.
The museum shows paintings of the last century.
They walked along the river until sunset.
The orchestra tuned its instruments before the concert.
Penguins live in the southern half of the world.
The desert is hot by day and cold by night.
Snow covered the village for three months.
The ship crossed the ocean in nine days.
A lawyer advises people on matters of law.
The teacher wrote the answer on the board.
Cheese is made from milk.""".splitlines()
PROMPTS = [
    ("The capital of France is", " Paris."),
    ("Water boils at", " one hundred degrees Celsius."),
    ("The currency of Japan is the", " yen."),
]


def facts() -> list[str]:
    lines = []
    for country, (city, currency, river) in SUBJECTS.items():
        lines += [
            f"{city} is the capital of {country}, and its largest city."
            if country == "France"
            else f"{city} lies in {country} and has many inhabitants.",
            f"People in {country} pay with the {currency}.",
            f"The best known river of {country} is {river}.",
        ]
    return lines + OTHERS


def speeches(count: int) -> list[str]:
    from attribution import passages

    return passages(count)


def written(folder: Path, texts: list[str], prompts: list[tuple[str, str]]) -> list[str]:
    """Options that name the documents and the queries, which are files in a folder."""
    data, asked = folder / "train.jsonl", folder / "queries.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pairs = [{"prompt": prompt, "completion": completion} for prompt, completion in prompts]
    asked.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return ["--data", str(data), "--query", f"@{asked}"]


def stories(model: Path, count: int) -> list[str]:
    """Beginnings of stories, written by the model itself from different first words."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    names = ("Lily", "Tom", "Sue", "Ben", "Mia", "Max", "Anna", "Tim", "Sara", "Jack")
    things = ("a cat", "a dog", "a ball", "a boat", "a tree", "a bird", "a cake", "a car")
    starts = [f"Once upon a time, {n} had {t}" for n in names for t in things]
    texts = []
    torch.manual_seed(0)
    for start in (starts * 3)[:count]:
        tokens = tokenizer(start, return_tensors="pt").input_ids
        made = network.generate(tokens, max_new_tokens=40, do_sample=True, pad_token_id=0)
        texts.append(tokenizer.decode(made[0], skip_special_tokens=True))
    return texts


def options(case: str, folder: Path) -> list[str]:
    """What the command of a case says, but for the run's folder."""
    if case == "digits":
        return ["--task", "digits", "--query", "eval:0-9"]
    if case == "gpt2":
        inputs = make(folder, 2000)
        return [
            *("--model", str(inputs.model), "--data", str(inputs.train)),
            *("--query", f"@{inputs.queries}"),
        ]
    if case == "stories":
        model = stories15m()
        asked = [("Once upon a time, there was a little girl named", " Lily. She had a cat.")]
        texts = stories(model, 200) + facts()
        return ["--model", str(model), *written(folder, texts, asked)]
    texts = facts() + (speeches(436) if case == "smollm2-500" else [])
    return ["--model", str(smollm2()), "--no-chat", *written(folder, texts, PROMPTS)]


def scores(folder: Path) -> Tensor:
    (path,) = (folder / "scores").glob("*.safetensors")
    return load_file(path)["scores"]


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


def agreement(values: Tensor, right: Tensor) -> str:
    correlations, common = [], []
    for one, other in zip(values, right, strict=True):
        pair = torch.stack([ranks(one), ranks(other)])
        correlations.append(float(torch.corrcoef(pair)[0, 1]))
        best = [set(row.topk(10).indices.tolist()) for row in (one, other)]
        common.append(len(best[0] & best[1]))
    return f"{statistics.mean(correlations):9.3f}{statistics.mean(common):8.1f} of 10"


def measure(case: str, rounds: int, keep: Path | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep / case if keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        asked = options(case, folder)
        results: dict[str, list[dict[str, float]]] = {}
        right = None
        for name, extra in (("default", []), ("--store", ["--store"])):
            try:
                for turn in range(rounds):
                    out = folder / f"{name.strip('-')}-{turn}"
                    taken = run([*ISOKRON, str(out), *asked, *extra], folder / f"{name}.log")
                    results.setdefault(name, []).append(taken)
            except SystemExit as error:
                # no store within the memory is good enough: the command says so
                print(f"{case:13}{name:9} {str(error).splitlines()[-1]}", flush=True)
                continue
            values = scores(folder / f"{name.strip('-')}-0")
            right = values if right is None else right
            log = (folder / f"{name}.log").read_text()
            middle = {key: statistics.median(r[key] for r in results[name]) for key in taken}
            print(
                f"{case:13}{name:9}{middle['wall']:8.1f}{middle['cpu']:8.1f}"
                f"{middle['peak'] / 2**30:7.2f}{agreement(values, right)}",
                flush=True,
            )
            for line in log.splitlines():
                if line.startswith(("covers", "memory", "scores:", "Projected", "Time")):
                    print(f"    {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = ("digits", "gpt2", "stories", "smollm2-64", "smollm2-500")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(cases))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="Folder in which runs and pages stay.")
    args = parser.parse_args()
    with recorded("language_models"):
        print(conditions())
        print(f"{'':22}{'wall s':>8}{'CPU s':>8}{'GiB':>7}{'Spearman':>9}{'top ten':>12}")
        for case in args.only:
            measure(case, args.rounds, args.keep)


if __name__ == "__main__":
    main()
