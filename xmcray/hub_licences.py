"""Licences as the metadata of the Hugging Face Hub names them.

The Hub refuses a card with an id that is not on its list
(https://huggingface.co/docs/hub/repositories-licenses). It takes any other licence as `other`, with
a name.
"""

from __future__ import annotations

import re

UNKNOWN = "unknown"
LONGEST_NAME = 80
# "other" is on the list too, but needs a name.
_LISTED = """
    afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc
    cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0
    cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0
    cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
    creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 gemma
    gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 lppl-1.3c mit mpl-2.0
    ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 pddl postgresql unknown unlicense
    wtfpl zlib
"""
IDS = frozenset(_LISTED.split())
# What people write, in the form of `_slug`, and the id that means the same.
_SPELLINGS = {
    "": UNKNOWN,
    "none": UNKNOWN,
    "not-recorded": UNKNOWN,
    "apache-2": "apache-2.0",
    "apache2": "apache-2.0",
    "apache2.0": "apache-2.0",
    "apache-license-2.0": "apache-2.0",
    "bsd-2": "bsd-2-clause",
    "bsd-3": "bsd-3-clause",
    "cc0": "cc0-1.0",
    "cc-0": "cc0-1.0",
    "gplv2": "gpl-2.0",
    "gplv3": "gpl-3.0",
    "lgplv3": "lgpl-3.0",
    "agplv3": "agpl-3.0",
    "mit-license": "mit",
    "odbl-1.0": "odbl",
    "odc-by-1.0": "odc-by",
    "pddl-1.0": "pddl",
}


def hub_licence(licence: str) -> dict[str, str]:
    """The fields of a card's metadata for a licence as its user wrote it."""
    name = _slug(licence)
    # SPDX's ids of the GNU licences end with "-only".
    listed = _SPELLINGS.get(name, name.removesuffix("-only"))
    if listed in IDS:
        return {"license": listed}
    # A name has letters, digits, points and hyphens.
    return {"license": "other", "license_name": name.replace("+", "-plus")[:LONGEST_NAME]}


def _slug(licence: str) -> str:
    """Lower case, with hyphens between words: "CC BY 4.0" -> "cc-by-4.0"."""
    slug = re.sub(r"[^a-z0-9.+]+", "-", licence.lower()).strip("-.")
    # A name in another script has no letters left.
    return slug or ("unnamed" if licence.strip() else "")
