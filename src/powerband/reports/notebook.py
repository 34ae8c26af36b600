"""Documents in a notebook: the HTML page of a kind, or its YAML."""

from __future__ import annotations

from html import escape

from powerband.core.document import Document
from powerband.core.evaluation import Evaluation
from powerband.core.measurement import Measurement
from powerband.core.plan import Plan
from powerband.reports import evaluation, html, plan


def render(document: Document) -> str:
    """Return HTML for a notebook cell; a page is framed, so that its style does not affect the notebook."""
    page = None
    if isinstance(document, Plan):
        page = plan.page(document)
    elif isinstance(document, Measurement):
        page = html.measurement(document)
    elif isinstance(document, Evaluation):
        page = evaluation.page(document)
    if page is None:
        return f"<pre>{escape(document.to_text())}</pre>"
    return f'<iframe srcdoc="{escape(page)}" width="100%" height="600" frameborder="0"></iframe>'
