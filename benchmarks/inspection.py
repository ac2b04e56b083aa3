"""The sentences that `isokron inspect --task digits` prints below its table.

python benchmarks/inspection.py
"""

from records import recorded

from isokron.inspect import Setup, measure, texts
from isokron.tasks import load


def main() -> None:
    result, _ = measure(Setup(load("digits")))
    verdict, _, _ = texts(result)
    with recorded("inspection"):
        print(" ".join(verdict))


if __name__ == "__main__":
    main()
