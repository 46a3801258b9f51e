"""Checks a model that is to be served, as far as that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from halda import ModelProfile
from primad.certify.first import certified, warning
from primad.certify.verdict import load_verdict, why_not_shared, with_verdict
from primad.daemon.node import Node
from primad.daemon.reporter import Reporter
from primad.errors import ConfigError
from primad.gguf.adapter import Adapter
from primad.gguf.adapter_shares import adapted_ranks
from primad.gguf.architectures.cuts import cuttable, why_whole
from primad.gguf.architectures.table import ADVICE, NotCutError
from primad.gguf.header import Header
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.ranged import RangedModel
from primad.gguf.share_rules import ShareRules
from primad.head.model.encoder import EncoderFile, encoder_file
from primad.head.model.options import ServeOptions, is_for_several
from primad.head.model.service import Service, service_of
from primad.head.model.vocabulary import chat_template_of
from primad.planning.adapters import check_adapters, open_adapters, with_adapters, with_rope
from primad.planning.check_run import check_run
from primad.planning.draft_model import AUTO, MAX_CONTEXT, choose_draft, draft_model, models_here, no_room_here
from primad.planning.predicting import drafts_line, predicts, with_predicting
from primad.ring.speculation.messages import DraftModel
from primad.settings.config import Config, models_folder
from primad.system.memory import memory

NO_TEMPLATE: Final = (
    "the model file has no chat template, so the model may not be made for chat; messages are formatted as ChatML, "
    "or with --chat-template FILE"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """The model of ``header``, as it can be served with ``options``. ``template`` is its chat template, None for
    ChatML."""

    header: Header
    profile: ModelProfile
    options: ServeOptions
    template: str | None
    ranged: RangedModel | None
    adapters: Sequence[Adapter]
    draft: DraftModel | None
    head_has_room: bool
    predicts: bool
    encoder: EncoderFile

    def service(self, node: Node) -> Service:
        """Return the service of the model on ``node``. Raises ``PlanError`` if no work can be planned for it."""
        return service_of(
            node,
            self.header,
            self.profile,
            self.options,
            self.ranged,
            self.draft,
            self.adapters,
            head_has_room=self.head_has_room,
            predicts=self.predicts,
            encoder=self.encoder,
        )


def check_model(config: Config, source: Path | RangedModel, options: ServeOptions, reporter: Reporter) -> CheckedModel:
    """Check the model of ``source``. Raises ``ConfigError``, ``ModelError`` or ``PlanError``."""
    ranged = source if isinstance(source, RangedModel) else None
    header = open_model(source) if isinstance(source, Path) else source.header
    adapters = open_adapters(options.lora, header)
    header, why_not = (header, "") if options.single_device else certified(header, config.home, reporter.report_line)
    options = as_it_can_be(options, config, header, reporter, why_not)
    verdict = load_verdict(config.home, header)
    warned = "" if options.single_device else warning(header, verdict)
    if warned:
        reporter.report_line(warned)
    template = template_of(options.chat_template, header, reporter)
    model = with_adapters(with_verdict(model_profile(header), header, verdict), adapters)
    model = with_rope(model, header, options.rope)
    check_options(options, config, header, model)
    if options.run.parallel == "tensor":
        check_shared(options, header, adapters, why_not or why_not_shared(config.home, header))
    check_adapters(adapters, several=is_for_several(options, config))
    drafts_itself = predicts(options.run, header, _why_not_itself(options, ranged), free_bytes=memory().available_bytes)
    if drafts_itself:
        model = with_predicting(model, header)
    if line := drafts_line(options.run, header, drafts=drafts_itself):
        reporter.report_line(line)
    draft, has_room = draft_of(options, config, header, reporter, memory().available_bytes)
    encoder, line = encoder_file(options.mmproj, header.path, options.projector, options.image_tokens[1])
    if line:
        reporter.report_line(line)
    options = replace(options, run=replace(options.run, whole_rows=encoder.whole_tokens))
    return CheckedModel(
        header=header,
        profile=model,
        options=options,
        template=template,
        ranged=ranged,
        adapters=adapters,
        draft=draft,
        head_has_room=has_room,
        predicts=drafts_itself,
        encoder=encoder,
    )


def template_of(given: str | None, header: Header, reporter: Reporter) -> str | None:
    """Return the chat template: the ``given`` one, the file's, or None for ChatML.

    The owner is warned of ChatML: a model that does not know it emits its own markers, which would look like a fault of
    the server."""
    template = given or chat_template_of(header)
    if template is None:
        reporter.report_line(NO_TEMPLATE)
    return template


def check_options(options: ServeOptions, config: Config, header: Header, model: ModelProfile) -> None:
    """Check everything that can be checked without the network. Raises ``ConfigError``, ``PlanError`` or
    ``ModelError``."""
    check_run(options.run, model, options.draft)
    if is_for_several(options, config):
        cuttable(header)


def check_shared(options: ServeOptions, header: Header, adapters: Sequence[Adapter], why_not: str = "") -> None:
    """Check what a tensor-parallel group is to compute. ``why_not`` is the reason why the model is not certified.

    Raises ``ConfigError`` for unsupported options, and ``NotCutError`` for a model that cannot be shared."""
    if why_not:
        raise NotCutError(f"{header.path}: {why_not}", ADVICE)
    adapted_ranks(ShareRules(header), 2, adapters)
    if options.single_device:
        raise ConfigError("--parallel tensor: cannot be combined with --single-device; leave one of them out")


def as_it_can_be(
    options: ServeOptions, config: Config, header: Header, reporter: Reporter, why_not: str = ""
) -> ServeOptions:
    """Return ``options``, changed to this device only if the model cannot be cut and no other devices were requested.

    ``why_not`` is the reason why the model is not certified. Raises ``NotCutError`` if other devices were requested.
    """
    is_asked = is_for_several(options, config)
    if why_not and is_asked:
        raise NotCutError(f"{header.path}: {why_not}", ADVICE)
    if options.single_device or is_asked:
        return options
    if reason := why_not or why_whole(header):
        reporter.report_line(f"{reason}; only this device serves it")
        return replace(options, single_device=True)
    return options


def draft_of(
    options: ServeOptions, config: Config, header: Header, reporter: Reporter, free_bytes: int
) -> tuple[DraftModel | None, bool]:
    """Return the draft model, if there is one, and whether it fits into ``free_bytes`` of free memory here.

    Raises ``ConfigError`` if it cannot draft, or must run here and has no room.
    """
    path, is_here = options.draft, options.single_device or options.run.draft_on == config.name
    if path == AUTO:
        paths = models_here(header, models_folder(config.home))
        found = choose_draft(header, paths, context=MAX_CONTEXT, free_bytes=free_bytes)
        if found.path is None and not is_here:
            found = choose_draft(header, paths, context=MAX_CONTEXT, free_bytes=None)
        reporter.report_line(f"--draft auto: {found}")
        path = found.path
    if path is None:
        return None, True
    model = draft_model(path, header, context=MAX_CONTEXT, threads=config.threads)
    has_room = model.memory_bytes <= free_bytes
    if not has_room:
        if is_here or why_whole(open_model(path)):
            raise ConfigError(f"{no_room_here(model, free_bytes)}; choose a smaller model")
        reporter.report_line(f"{no_room_here(model, free_bytes)}: it runs on a device that has room")
    return model, has_room


def _why_not_itself(options: ServeOptions, ranged: RangedModel | None) -> str:
    """Return what keeps the model from drafting with its own layers; empty if nothing does."""
    if options.draft is not None:
        return "--draft names another model that drafts"
    if options.lora:
        return "adapters change the model, but not its layer that drafts"
    return "" if ranged is None else "the model's file is not here; primad pull fetches it"
