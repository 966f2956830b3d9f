"""One finished run beside the yardsticks.

What: `results_table(result)`: our bits per byte among count models and compressors.
Why: the last thing a run prints says where it stands.
When not: many runs; that is `report.table`.
"""

from collections.abc import Mapping
from typing import Any

from memjax.report.text_table import text_table
from memjax.report.yardsticks import yardsticks


def results_table(
    result: Mapping[str, Any], *, split: str = "valid", markdown: bool = False
) -> str:
    """A table of methods (rows, worst first) against the corpora of the run.

    Args:
      result: has `split` -> {corpus: bits per byte} and, when there are several
        corpora, `{split}_bpb`, the figure over all of them.
      split: "valid" or "test".
      markdown: Markdown instead of aligned text.

    Corpora without yardsticks show our figure alone. Rows are sorted by the first
    corpus; a method that was not measured on it comes last.
    """
    per_corpus: Mapping[str, float] = result[split]
    corpora = list(per_corpus)
    rows: dict[str, dict[str, float]] = {"this run": dict(per_corpus)}
    meanings = {"this run": "bits per byte, every byte scored once"}
    for corpus in corpora:
        for mark in yardsticks(corpus, split):
            rows.setdefault(mark.method, {})[corpus] = mark.bits_per_byte
            meanings[mark.method] = mark.meaning
    order = sorted(rows, key=lambda name: -rows[name].get(corpora[0], float("-inf")))
    header = ["", *(f"{corpus} {split}" for corpus in corpora)]
    together = len(corpora) > 1
    if together:
        header.append(f"all {split}")
        rows["this run"]["*"] = result[f"{split}_bpb"]
    columns = [*corpora, "*"] if together else corpora
    body = [
        [
            name,
            *(
                f"{rows[name][column]:.3f}" if column in rows[name] else ""
                for column in columns
            ),
            meanings[name],
        ]
        for name in order
    ]
    return text_table([*header, "meaning"], body, markdown=markdown)
