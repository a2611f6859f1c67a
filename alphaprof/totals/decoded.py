"""Totals of documents of all kinds of text together, each under the rule that its text is decoded by."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from alphaprof.log.run import Run
from alphaprof.rules import decoded_rule
from alphaprof.stats.estimate import Array
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.documents import Documents
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, merged, pools


def decoded_totals(run: Run, draft: str, table: pa.Table, rule: str) -> tuple[DocumentTotals, Array]:
    """Totals of a draft on the rows of a documents table, in their order, and the id of each one's rule, [documents].

    Every text is one that the target chose. `rule`: that of a decision. Raises `RunUnreadable`.
    """
    documents = Documents.of(table)
    rules = [decoded_rule(rule, group.policy) for group in documents.groups]
    totals = read_totals(run, draft, TotalsRequest(sorted(set(rules)), run.gammas))
    found = {rule: [pool for _, pool in pools([totals], documents, rule, run.gammas)] for rule in set(rules)}
    whole = merged([found[rule][place] for place, rule in enumerate(rules)])
    order = np.argsort(np.concatenate([group.rows for group in documents.groups]))
    names = np.concatenate([np.full(len(group.rows), rule) for group, rule in zip(documents.groups, rules, strict=True)])
    return whole.rows(order), names[order]
