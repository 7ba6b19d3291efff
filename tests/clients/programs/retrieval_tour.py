"""Clients of embeddings, rerankers and classifiers, on encoders: Cohere's, Hugging Face's, Ollama's, LangChain's,
LlamaIndex's and Haystack's. KIND is "embeds", "ranks" or "labels". Their results are compared with the server's own
`/v1/embeddings`, `/score` and `/classify`, by another client."""

import json
import os
import urllib.request

os.environ["HF_HUB_OFFLINE"] = "0"  # else Hugging Face's client sends nothing, wherever to

import cohere
import ollama
from cohere.errors import BadRequestError
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from langchain_cohere import CohereRerank
from langchain_core.documents import Document as LangChainDocument
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.cohere_rerank import CohereRerank as LlamaCohereRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank
from openai import OpenAI
from steps import BASE, KEY, MODEL, URL, raises, run, step

QUERY, TEXTS = "Where is the fox?", ["the quick brown fox", "A second text.", "the brown dog", "café über naïve 中文"]
TOO_LONG = "fox " * 100
SECRET = Secret.from_token(KEY)


def post(path, **body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{URL}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def vectors(texts, **fields):
    return [each["embedding"] for each in post("/v1/embeddings", input=texts, **fields)["data"]]


def scores():
    return [each["score"] for each in post("/score", text_1=QUERY, text_2=TEXTS)["data"]]


def order():
    found = scores()
    return sorted(range(len(found)), key=lambda index: -found[index])


def near(left, right):
    assert len(left) == len(right), (len(left), len(right))
    for one, other in zip(left, right, strict=True):
        if isinstance(one, (int, float)):
            assert abs(one - other) <= 1e-5, (one, other)
        else:
            near(list(one), list(other))


@step("embeds")
def openai_embeddings():
    client = OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
    found = client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64
    near([each.embedding for each in found.data], vectors(TEXTS))
    (cut,) = client.embeddings.create(model=MODEL, input=TEXTS[:1], dimensions=8).data
    assert len(cut.embedding) == 8


@step("embeds")
def hugging_face():
    for client in (InferenceClient(model=URL), InferenceClient(model=f"{URL}/embed")):
        near(client.feature_extraction(TEXTS, normalize=True).tolist(), vectors(TEXTS))
        near(client.feature_extraction(TEXTS[0]).tolist(), vectors(TEXTS[:1]))
        near(client.feature_extraction(TEXTS[0], normalize=False).tolist(), vectors(TEXTS[:1], normalize=False))
        assert client.feature_extraction(TEXTS[0], dimensions=8).shape == (1, 8)
    near(client.feature_extraction(TOO_LONG, truncate=True).tolist(), vectors([TOO_LONG], truncate_prompt_tokens=-1))
    with raises(HfHubHTTPError, "maximum context length is 64 tokens"):
        client.feature_extraction(TOO_LONG, truncate=False)
    similar = InferenceClient(model=f"{URL}/similarity").sentence_similarity(QUERY, TEXTS)
    near(similar, [each["score"] for each in post("/similarity", text_1=QUERY, text_2=TEXTS)["data"]])


@step("embeds")
async def langchain():
    embedder = OpenAIEmbeddings(model=MODEL, base_url=BASE, api_key=KEY, check_embedding_ctx_length=False)
    near(embedder.embed_documents(TEXTS), vectors(TEXTS))
    near(embedder.embed_query(QUERY), vectors([QUERY])[0])
    near(await embedder.aembed_documents(TEXTS), vectors(TEXTS))


@step("embeds")
async def llama_index():
    embedder = TextEmbeddingsInference(model_name=MODEL, base_url=URL, query_instruction="", text_instruction="")
    near(embedder.get_text_embedding_batch(TEXTS), vectors(TEXTS))
    near(await embedder.aget_query_embedding(QUERY), vectors([QUERY])[0])
    near(embedder.get_text_embedding(TOO_LONG), vectors([TOO_LONG], truncate_prompt_tokens=-1)[0])


@step("embeds")
def haystack():
    where = {"api_type": "text_embeddings_inference", "api_params": {"url": URL}, "token": SECRET}
    near(HuggingFaceAPITextEmbedder(**where).run(QUERY)["embedding"], vectors([QUERY], normalize=False)[0])
    embedder = HuggingFaceAPIDocumentEmbedder(**where, normalize=True, progress_bar=False)
    found = embedder.run([Document(content=text) for text in TEXTS])["documents"]
    near([each.embedding for each in found], vectors(TEXTS))


@step("embeds")
def ollama_embed():
    client = ollama.Client(host=URL)
    near(client.embed(MODEL, TEXTS).embeddings, vectors(TEXTS))
    near(client.embeddings(MODEL, QUERY).embedding, vectors([QUERY], normalize=False)[0])
    near(client.embed(MODEL, TOO_LONG).embeddings, vectors([TOO_LONG], truncate_prompt_tokens=-1))
    with raises(ollama.ResponseError, "64 tokens"):
        client.embed(MODEL, TOO_LONG, truncate=False)
    assert client.show(MODEL).capabilities == ["embedding"]
    with raises(ollama.ResponseError, "generates no text"):
        client.chat(MODEL, [{"role": "user", "content": "Hi"}])


@step("ranks")
async def cohere_rerank():
    theirs = scores()
    for client in (cohere.ClientV2(KEY, base_url=URL), cohere.Client(KEY, base_url=URL)):
        found = client.rerank(model=MODEL, query=QUERY, documents=TEXTS).results
        assert [each.index for each in found] == order()
        near([each.relevance_score for each in found], [theirs[index] for index in order()])
        assert len(client.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2).results) == 2
    assert cohere.ClientV2(KEY, base_url=URL).rerank(model=MODEL, query=QUERY, documents=[TOO_LONG]).results
    found = await cohere.AsyncClientV2(KEY, base_url=URL).rerank(model=MODEL, query=QUERY, documents=TEXTS)
    assert [each.index for each in found.results] == order()
    with raises(BadRequestError, "documents"):
        cohere.ClientV2(KEY, base_url=URL).rerank(model=MODEL, query=QUERY, documents=[])


@step("ranks")
def langchain_rerank():
    ranker = CohereRerank(cohere_api_key=KEY, base_url=URL, model=MODEL, top_n=3)
    found = ranker.compress_documents([LangChainDocument(page_content=text) for text in TEXTS], QUERY)
    assert [each.page_content for each in found] == [TEXTS[index] for index in order()[:3]]


@step("ranks")
def llama_index_rerank():
    for ranker in (
        TeiRerank(base_url=URL, top_n=3),
        LlamaCohereRerank(base_url=URL, api_key=KEY, model=MODEL, top_n=3),
    ):
        nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
        found = ranker.postprocess_nodes(nodes, QueryBundle(QUERY))
        assert [each.node.text for each in found] == [TEXTS[index] for index in order()[:3]]
        near([each.score for each in found], sorted(scores(), reverse=True)[:3])


@step("ranks")
async def haystack_rank():
    documents = [Document(content=text) for text in TEXTS]
    for ranker in (
        HuggingFaceTEIRanker(url=URL, top_k=3),
        CohereRanker(model=MODEL, api_key=SECRET, api_base_url=URL, top_k=3),
    ):
        found = ranker.run(query=QUERY, documents=documents)["documents"]
        assert [each.content for each in found] == [TEXTS[index] for index in order()[:3]]
    ranker = HuggingFaceTEIRanker(url=URL, raw_scores=True)
    raw = post("/score", text_1=QUERY, text_2=TEXTS, use_activation=False)["data"]
    found = (await ranker.run_async(query=QUERY, documents=documents))["documents"]
    near([each.score for each in found], sorted((each["score"] for each in raw), reverse=True))


@step("labels")
def classifier():
    (own,) = post("/classify", input=QUERY)["data"]
    client = InferenceClient(model=URL)
    found = client.text_classification(QUERY)
    assert found[0].label == own["label"]
    near([each.score for each in found], sorted(own["probs"], reverse=True))
    assert len(client.text_classification(QUERY, top_k=1)) == 1
    raw = client.text_classification(QUERY, function_to_apply="none")
    near([each.score for each in raw],
         sorted(post("/classify", input=QUERY, use_activation=False)["data"][0]["probs"], reverse=True))  # fmt: skip


@step("labels")
def no_rank_and_no_chat():
    with raises(BadRequestError, "cannot rank"):
        cohere.ClientV2(KEY, base_url=URL).rerank(model=MODEL, query=QUERY, documents=TEXTS)


run()
