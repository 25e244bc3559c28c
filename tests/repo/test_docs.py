"""Pages that are written by a command are what the command writes."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_settings_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == script["page"](), (
        "run: python docs/settings.py"
    )


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [part.split(")", 1)[0] for part in text.split("](")[1:]]
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
