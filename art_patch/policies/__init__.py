"""A policy on disk: its adapter directory, the check and the probe that prove it, and copies for other tools.

`files` publishes and reads an adapter's directory, `validation` checks a LoRA before an engine loads it, `base_model`
reads what its base is, `probe` compares what the trainer computed with what a server computes. `merge`, `model_files`,
`card` and `hub` make the copies that leave the project.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.policies.base_model import BaseModel, base_fingerprint, read_base_model, resolve_model_dir
    from art_patch.policies.card import Copied, hub_id_of, model_card
    from art_patch.policies.files import MANIFEST, read_json, some
    from art_patch.policies.hub import Hub, check_repository
    from art_patch.policies.merge import Merged, write_adapter, write_merged
    from art_patch.policies.model_files import README, Dtype
    from art_patch.policies.probe import ENTRY, Probe, check_probe
    from art_patch.policies.validation import (
        CONFIG,
        WEIGHTS,
        ValidatedAdapter,
        check_content,
        check_name,
        publish_adapter,
        validate_adapter,
    )
else:
    __getattr__ = lazily(
        __name__,
        {
            "base_model": "BaseModel base_fingerprint read_base_model resolve_model_dir",
            "card": "Copied hub_id_of model_card",
            "files": "MANIFEST read_json some",
            "hub": "Hub check_repository",
            "merge": "Merged write_adapter write_merged",
            "model_files": "Dtype README",
            "probe": "Probe ENTRY check_probe",
            "validation": "CONFIG ValidatedAdapter WEIGHTS check_content check_name publish_adapter validate_adapter",
        },
    )
