"""The final policy as a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path

from megarl.errors import UserError
from megarl.monitor.progress import progress
from megarl.training.folder import EXPORT
from megarl.training.run import Run
from megarl.weights.checkpoint_files import write_checkpoint
from megarl.weights.exchange import iter_hf_tensors


def export_hf(run: Run) -> Path:
    """Write the policy of now to the run's `hf` folder and return it. Collective; the main rank writes. Raises
    UserError on every rank where the disk refuses."""
    target, config = run.plan.folder / EXPORT, run.plan.config
    problem = None
    with progress("Writing the Hugging Face checkpoint", enabled=run.groups.is_main, announce=True):
        tensors = iter_hf_tensors(run.name_map)
        if run.groups.is_main:
            try:
                write_checkpoint(
                    target,
                    tensors,
                    config=run.plan.hf_config,
                    assets=run.tokenizer.folder,
                    dtype=run.policy.config.params_dtype,
                    model=run.start_folder,
                    chat_template=run.tokenizer.hf.chat_template if config.model.chat_template else None,
                    stops=run.tokenizer.stop_token_ids,
                )
            except OSError as error:
                problem = f"{target}: cannot be written ({error.strerror}); the run's checkpoints are whole"
        for _ in tensors:  # the other ranks' part of every gather, and what a failed write left
            pass
    if (problem := run.groups.share_from_main(problem)) is not None:
        raise UserError(problem)
    return target
