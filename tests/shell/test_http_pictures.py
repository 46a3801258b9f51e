"""Pictures in requests of every dialect: their place in the prompt, their cost, and refusals by name."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from primad.api.http.connection import MAX_BODY_BYTES
from tests.fakes.backend import BOS, IM_END, IM_START, ByteVocabulary, FakeBackend, replies
from tests.fakes.http import call, post
from tools.lab.mmproj import noise

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
ONE, TWO = noise(1, 8, 8), noise(2, 8, 8)
SIZE = 6
"""Positions of a picture in a prompt: four embeddings between two tokens."""


def based(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{based(data)}"


def backend(template: str = TEMPLATE, **served) -> FakeBackend:
    made = FakeBackend(replies("ok"), vocabulary=ByteVocabulary(chat_template=template))
    made.served = replace(made.served, sees=True, **served)
    return made


def shown(prompt: list[int]) -> str:
    """A prompt as text, with pictures as their index in the prompt."""
    text, pictures = "", []
    for token in prompt:
        if token >= 0:
            text += chr(token) if token < 256 else {BOS: "^", IM_START: "<", IM_END: ">"}.get(token, "?")
        elif token not in pictures:
            pictures.append(token)
    return text


TEXT, PICTURE = {"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url(ONE), "detail": "low"}}
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [TEXT, PICTURE, {"type": "text", "text": "?"}]}]},
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "See "},
                    {"type": "input_image", "image_url": url(ONE)},
                    {"type": "input_text", "text": "?"},
                ],
            }
        ]
    },
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [
                    TEXT,
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": based(ONE)}},
                    {"type": "text", "text": "?"},
                ],
            }
        ],
    },
    "/api/chat": {"model": "toy", "messages": [{"role": "user", "content": "?", "images": [based(ONE)]}]},
    "/api/generate": {"model": "toy", "prompt": "?", "images": [based(ONE)]},
    "/completion": {"prompt": {"prompt_string": "See <__media__>?", "multimodal_data": [based(ONE)]}},
}
CHAT, OLLAMA = "/v1/chat/completions", "/api/chat"


@pytest.mark.parametrize("path", BODIES)
def test_a_picture_stands_in_the_prompt_where_the_client_put_it(path):
    made = backend()
    response = post(made, path, **BODIES[path], stream=False)
    assert response.status_code == 200, response.text
    (asked,) = made.calls
    expected = "^See <>?" if path == "/completion" else "^[user]See <>?>" if "/v1" in path else "^[user]<>?>"
    assert shown(asked.prompt) == expected
    assert [(each.first, each.rows) for each in asked.pictures] == [(expected.index("<") + 1, 4)]


def test_usage_and_token_counts_include_picture_tokens():
    body, plain = BODIES[CHAT], {"messages": [{"role": "user", "content": "See ?"}]}
    used = post(backend(), CHAT, **body).json()["usage"]["prompt_tokens"]
    assert used == post(backend(), CHAT, **plain).json()["usage"]["prompt_tokens"] + SIZE
    assert post(backend(), f"{CHAT}/input_tokens", **body).json()["input_tokens"] == used
    assert post(backend(), "/v1/responses/input_tokens", **BODIES["/v1/responses"]).json()["input_tokens"] == used
    counted = {key: value for key, value in BODIES["/v1/messages"].items() if key != "max_tokens"}
    assert post(backend(), "/v1/messages/count_tokens", **counted).json()["input_tokens"] == used


def test_a_context_that_pictures_exceed_is_refused_or_shifted():
    turns = [{"role": "user", "content": [PICTURE]}, {"role": "assistant", "content": "a"}] * 5
    messages = [*turns, {"role": "user", "content": [PICTURE, {"type": "text", "text": "?"}]}]
    refused = post(backend(context_tokens=60), CHAT, messages=messages)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    made = backend(context_tokens=60, context_shift=True)
    assert post(made, CHAT, messages=messages).status_code == 200
    assert shown(made.calls[0].prompt).endswith("[user]<>?>")
    assert len(made.calls[0].pictures) < 6


def test_ollamas_chats_lose_their_oldest_turns_with_their_pictures_unless_truncate_is_false():
    turns = [{"role": "user", "content": "see", "images": [based(ONE)]}, {"role": "assistant", "content": "a"}] * 5
    messages = [{"role": "system", "content": "S"}, *turns, {"role": "user", "content": "?", "images": [based(ONE)]}]
    for truncate in ({}, {"truncate": True}):
        made = backend(context_tokens=90)
        response = post(made, "/api/chat", model="toy", messages=messages, stream=False, **truncate)
        assert response.status_code == 200, response.text
        assert shown(made.calls[0].prompt).startswith("^[system]S[user]<>see")
        assert shown(made.calls[0].prompt).endswith("[user]<>?>")
        assert 1 < len(made.calls[0].pictures) < 6
    for shifts in (False, True):
        made = backend(context_tokens=90, context_shift=shifts)
        assert post(made, "/api/chat", model="toy", messages=messages, truncate=False).status_code == 400
        assert not made.calls
    text_only = [{"role": "user", "content": "x" * 100}]
    assert post(backend(context_tokens=90), "/api/chat", model="toy", messages=text_only).status_code == 400


def test_equal_pictures_have_equal_tokens_wherever_they_occur_and_others_do_not():
    made = backend()
    parts = [PICTURE, {"type": "image_url", "image_url": url(TWO)}, PICTURE]
    post(made, CHAT, messages=[{"role": "user", "content": parts}])
    rows = [made.calls[0].prompt[each.first : each.first + 4] for each in made.calls[0].pictures]
    assert rows[0] == rows[2]
    assert not set(rows[0]) & set(rows[1])
    assert all(token < 0 for each in rows for token in each)


def test_text_that_looks_like_a_place_for_a_picture_is_text():
    for text in ("<__media__>", "<image>", "qzpicture00112233445566778899aabbccddeeffx"):
        made = backend()
        post(made, CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": text}, PICTURE]}])
        assert shown(made.calls[0].prompt) == f"^[user]{text}<>>"


def test_a_tools_result_may_have_a_picture():
    made = backend()
    call_ = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    body = {"messages": [{"role": "user", "content": "look"}, {"role": "assistant", "tool_calls": [call_]}]}
    body["messages"].append({"role": "tool", "tool_call_id": "c", "content": [PICTURE]})
    assert post(made, CHAT, **body).status_code == 200
    assert len(made.calls[0].pictures) == 1
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [BODIES["/v1/messages"]["messages"][0]["content"][1]],
    }
    used = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    assert post(made, "/v1/messages", **BODIES["/v1/messages"] | {"messages": turns}).status_code == 200
    assert len(made.calls[1].pictures) == 1


@pytest.mark.parametrize("path", BODIES)
def test_without_an_encoder_the_error_names_the_missing_file(path):
    made = FakeBackend(replies("ok"), vocabulary=ByteVocabulary(chat_template=TEMPLATE))
    made.served = replace(made.served, lacks_encoder="put mmproj.gguf next to it")
    response = post(made, path, **BODIES[path], stream=False)
    assert response.status_code == 400
    assert "put mmproj.gguf next to it" in response.text
    assert not made.calls


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("https://example.org/a.png", "fetches no images (https: URL)"),
        ("http://127.0.0.1/a.png", "fetches no images (http: URL)"),
        ("file:///etc/passwd", "fetches no images (file: URL)"),
        ("data:video/mp4;base64,AAAA", "is of type video"),
        ("data:image/png;base64,?", "not the base64"),
        ("data:image/png;base64,", "not the base64"),
        ("", "not the base64"),
        (url(b"RIFF1234WEBP"), "cannot be decoded"),
    ],
)
def test_invalid_picture_data_is_refused_with_its_place(source, named):
    part = {"type": "image_url", "image_url": {"url": source}}
    response = post(backend(), CHAT, messages=[{"role": "user", "content": [TEXT, part]}])
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages[0].content[1]"


def test_audio_is_accepted_by_models_with_audio_input_and_refused_by_name_elsewhere():
    part = {"type": "input_audio", "input_audio": {"data": based(ONE), "format": "wav"}}
    body = {"messages": [{"role": "user", "content": [TEXT, part]}]}
    made = backend(hears=True)
    assert post(made, CHAT, **body).status_code == 200
    assert shown(made.calls[0].prompt) == "^[user]See <>>"
    assert "accepts images, but no audio" in post(backend(), CHAT, **body).json()["error"]["message"]
    deaf = FakeBackend(replies("ok"))
    assert "no encoder" in post(deaf, CHAT, **body).json()["error"]["message"]
    made.served = replace(made.served, sees=False, lacks_encoder="it accepts no images")
    assert "it accepts no images" in post(made, CHAT, **BODIES[CHAT]).text
    assert call(made, "GET", "/props").json()["modalities"] == {"vision": False, "audio": True}


def test_audio_is_accepted_in_dialects_that_have_it_and_refused_with_an_alternative_elsewhere():
    made = backend(hears=True)
    part = {"type": "input_audio", "input_audio": {"data": based(ONE), "format": "wav"}}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "See "}, part]}]
    assert post(made, "/v1/responses", input=items).status_code == 200
    assert shown(made.calls[0].prompt) == "^[user]See <>>"
    assert "accepts images, but no audio" in post(backend(), "/v1/responses", input=items).text
    for lacking in ({"type": "input_audio"}, part | {"input_audio": "x"}):
        assert "input_audio" in post(made, "/v1/responses", input=[{"role": "user", "content": [lacking]}]).text
    made.served = replace(made.served, sees=False)
    assert post(made, OLLAMA, **BODIES[OLLAMA]).status_code == 200, "the file among images tells what it is"
    for body in (
        {"messages": [{"role": "user", "content": "?", "audio": [based(ONE)]}]},
        {"prompt": "?", "audio": "A"},
    ):
        answer = post(made, OLLAMA if "messages" in body else "/api/generate", model="toy", **body)
        assert (answer.status_code, "send audio among images" in answer.text) == (400, True)
    audio = {"type": "audio", "source": {"type": "base64", "media_type": "audio/wav", "data": based(ONE)}}
    answer = post(made, "/v1/messages", **BODIES["/v1/messages"] | {"messages": [{"role": "user", "content": [audio]}]})
    assert "audio blocks are not supported: this API takes no audio; send it to /v1/chat/completions" in answer.text


@pytest.mark.parametrize("kind", ["audio_url", "video_url", "file", "input_file"])
def test_a_part_that_is_neither_picture_nor_audio_is_refused_by_name(kind):
    part = {"type": kind, kind: {"data": "AAAA", "format": "wav"}}
    response = post(backend(), CHAT, messages=[{"role": "user", "content": [part]}])
    assert response.status_code == 400
    assert f"'{kind}'" in response.json()["error"]["message"]


def test_errors_name_the_field_of_the_dialect():
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    body = BODIES["/v1/messages"] | {"messages": [{"role": "user", "content": [TEXT, image]}], "system": "s"}
    assert "messages[0].content[1]: this server fetches" in post(backend(), "/v1/messages", **body).text
    message = {"role": "user", "content": "?", "images": [based(ONE), "no"]}
    answer = post(backend(), OLLAMA, model="toy", messages=[message])
    assert "messages[0].images[1]: " in answer.json()["error"]
    parts = [{"type": "input_image", "image_url": "https://example.org/a.png"}]
    answer = post(backend(), "/v1/responses", instructions="s", input=[{"role": "user", "content": parts}])
    assert "input[0].content[0]: this server fetches" in answer.text
    answer = post(backend(), "/completion", prompt={"prompt_string": "no marker", "multimodal_data": [based(ONE)]})
    assert "0 markers <__media__> in its text, and 1 images" in answer.text


def test_a_picture_without_data_is_refused_with_the_missing_field():
    for part in ({"type": "image_url"}, {"type": "image_url", "image_url": {"detail": "low"}}, {"type": "input_audio"}):
        answer = post(backend(), CHAT, messages=[{"role": "user", "content": [part]}])
        assert f"a part of type '{part['type']}' lacks its data URL" in answer.text
    image = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    for content in ([image], [{"type": "tool_result", "tool_use_id": "a", "content": [image]}]):
        body = BODIES["/v1/messages"] | {"messages": [{"role": "user", "content": content}]}
        answer = post(backend(), "/v1/messages", **body)
        assert "images with a source of type 'file' are not supported" in answer.text


def test_the_number_of_pictures_is_bounded():
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}] * 10_000
    response = post(backend(), CHAT, messages=[{"role": "user", "content": parts}])
    assert response.status_code == 400
    assert "messages[0].content[100]: a request may have 100 images; this one has 10000" in response.text


def test_the_pictures_of_all_prompts_of_a_request_are_encoded_and_counted_together():
    prompts = [
        {"prompt_string": f"{name} <__media__>", "multimodal_data": [based(each)]}
        for name, each in (("a", ONE), ("b", TWO))
    ]
    made = backend()
    assert post(made, "/completion", prompt=prompts).status_code == 200
    assert [len(each.prompt) for each in made.calls] == [3 + SIZE] * 2
    response = post(backend(), "/completion", prompt=[prompts[0]] * 101)
    assert "prompt[100].multimodal_data[0]: a request may have 100 images" in response.text
    response = post(backend(), "/completion", prompt=[1, prompts[0]])
    assert (response.status_code, "a separate prompt" in response.text) == (400, True)


def test_a_template_that_leaves_a_picture_out_is_named():
    made = backend("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    messages = [{"role": "tool", "tool_call_id": "c", "content": [PICTURE]}, {"role": "user", "content": "?"}]
    response = post(made, CHAT, messages=messages)
    assert response.status_code == 200 or "leaves this image out" in response.text


def test_clients_can_see_that_the_model_has_vision():
    for sees in (True, False):
        made = backend()
        made.served = replace(made.served, sees=sees)
        assert call(made, "GET", "/props").json()["modalities"] == {"vision": sees, "audio": False}
        assert ("vision" in post(made, "/api/show", model="toy").json()["capabilities"]) is sees
        (entry,) = call(made, "GET", "/v1/models").json()["data"]
        assert ("multimodal" in entry.get("capabilities", ())) is sees
        assert entry.get("architecture", {}).get("input_modalities") == (["text", "image"] if sees else None)


def test_a_body_may_be_larger_where_the_model_sees():
    body = {"messages": [{"role": "user", "content": "x" * MAX_BODY_BYTES}]}
    made = FakeBackend(replies("ok"))
    assert post(made, CHAT, **body).status_code == 413
    assert "exceeds the available context size" in post(backend(), CHAT, **body).text


def test_a_template_is_shown_with_llama_servers_marker_for_a_picture():
    answer = post(backend(), "/apply-template", **BODIES[CHAT]).json()
    assert answer == {"prompt": "[user]See <__media__>?>"}
