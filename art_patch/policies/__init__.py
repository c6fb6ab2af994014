"""Policies on disk: their adapter directories, the checks before an engine serves one, and copies for other tools.

- `files` publishes, reads and deletes the directory of an adapter, the LoRA of one policy.
- `base_models` reads the tensor shapes and the fingerprint of a base model, and loads it.
- `validation` checks a LoRA's config and weights before an engine loads it, and what the engine then computes with it.
- `copies` writes a policy in file formats that other tools read, and uploads such a copy to a model hub.
- `adoption` reads a plain LoRA of PEFT that is to become a policy.
- `evidence` tells in the manifest of a copy how the policy was made and tested, and reads a copy that is imported.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.policies.adoption import lora_directory, read_lora
    from art_patch.policies.base_models import (
        BaseModel, auto_class, base_fingerprint, load_model, read_base_model, read_config, resolve_model_dir,
        why_unknown,
    )
    from art_patch.policies.copies import (
        Copied, Hub, Merged, check_repository, hub_id_of, write_adapter, write_card, write_merged,
    )
    from art_patch.policies.evidence import Evidence, Received, evidence_of, read_copy, write_manifest
    from art_patch.policies.files import (
        CONFIG, DATA, MANIFEST, NAME_PATTERN, WEIGHTS, Dtype, check_name, data_digests, manifest_to_share,
        publish_adapter, read_json, remove_adapter, remove_unpublished, some, unpublished,
    )
    from art_patch.policies.validation import (
        ENTRY, Probe, ValidatedAdapter, check_content, check_probe, lora_key, validate_adapter,
    )
else:
    __getattr__ = lazily()
