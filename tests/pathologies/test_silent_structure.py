"""Mistakes between layers that throw no error, each beside its mended twin, seen by ``watch()`` alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

WORDS, WIDTH, LENGTH = 12, 8, 9


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def told(model, loss, kind, *, steps=6):
    """Train; return the sites of the issues of one type."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    return [issue.layers for issue in exporter.issues if issue.issue_type == kind]


class Attends(nn.Module):
    """One layer of self-attention, in one of the ways in which people write it."""

    def __init__(self, how, *, causal):
        super().__init__()
        self.how, self.causal = how, causal
        self.inner = (
            nn.MultiheadAttention(WIDTH, 2, batch_first=True) if how == "module" else nn.Linear(WIDTH, 3 * WIDTH)
        )

    def forward(self, x):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.how == "module":
            return self.inner(x, x, x, attn_mask=later if self.causal else None, need_weights=False)[0]
        q, k, v = (part[:, None] for part in self.inner(x).chunk(3, -1))
        if self.how == "flag":
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)[:, 0]
        if self.how == "turned":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=~(later if self.causal else later.T))[:, 0]
        scores = q @ k.transpose(-1, -2)
        if self.how == "on the weights":
            weights = scores.softmax(-1)
            return ((weights.masked_fill(later, 0.0) if self.causal else weights) @ v)[:, 0]
        return ((scores.masked_fill(later, -torch.inf) if self.causal else scores).softmax(-1) @ v)[:, 0]


class Words(nn.Module):
    """Scores of words at each place of a text."""

    def __init__(self, reader):
        super().__init__()
        self.table, self.reader, self.last = nn.Embedding(WORDS, WIDTH), reader, nn.LazyLinear(WORDS)

    def forward(self, x):
        read = self.reader(self.table(x))
        return self.last(read[0] if isinstance(read, tuple) else read)


def texts():
    return torch.randint(WORDS, (6, LENGTH + 1))


def next_word(model, *, inside=False):
    """Return the loss of the next words; ``inside`` where the model is given the last word as well."""

    def loss():
        x = texts()
        scores = model(x)[:, :-1] if inside else model(x[:, :-1])
        return F.cross_entropy(scores.reshape(-1, WORDS), x[:, 1:].reshape(-1))

    model(texts())
    return loss


@pytest.mark.parametrize(("how", "inside"), [
    ("module", False), ("flag", False), ("flag", True), ("turned", False), ("by hand", True), ("on the weights", False),
])  # fmt: skip
def test_attention_that_sees_the_next_word_is_told_at_its_layer(how, inside):
    """Next words in sight are BAD_TARGETS at the attention, however it is written; a causal mask hides them."""
    wrong, right = (Words(Attends(how, causal=causal)) for causal in (False, True))
    (layers,) = told(wrong, next_word(wrong, inside=inside), IssueType.BAD_TARGETS)
    assert layers[0].startswith("reader")
    assert told(right, next_word(right, inside=inside), IssueType.BAD_TARGETS) == []


@pytest.mark.parametrize(("left_out", "past_first"), [(0, False), (1, False), (2, False), (0, True), (2, True)])
def test_the_first_places_may_be_left_out_of_the_loss(left_out, past_first):
    """As a prompt is, or what cannot be known yet; the words themselves, at later places, are no next words."""
    model = Words(Attends("flag", causal=False))
    model(texts())

    def loss():
        x = texts()
        y = x[:, :-1] if past_first else x[:, 1:]
        return F.cross_entropy(model(x[:, :-1])[:, left_out:].reshape(-1, WORDS), y[:, left_out:].reshape(-1))

    assert bool(told(model, loss, IssueType.BAD_TARGETS)) == (not past_first)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_that_reads_the_next_words_from_the_end_is_told(kind):
    """A bidirectional layer is BAD_TARGETS where next words are predicted; one that reads forward is none."""
    wrong, right = (Words(kind(WIDTH, 5, batch_first=True, bidirectional=both)) for both in (True, False))
    assert told(wrong, next_word(wrong), IssueType.BAD_TARGETS) == [("reader",)]
    assert told(right, next_word(right), IssueType.BAD_TARGETS) == []


def test_full_attention_is_in_order_where_targets_are_not_the_next_words():
    """A tagger, and hidden words of a text, are read with full attention."""
    model = Words(Attends("flag", causal=False))
    model(texts())

    def tags():
        x = texts()
        return F.cross_entropy(model(x).transpose(1, 2), (x + x.roll(1, 1)) % WORDS)

    def hidden():
        x = texts()
        y = torch.where(torch.rand(x.shape) < 0.3, x, -100)
        return F.cross_entropy(model(x.masked_fill(y >= 0, 0)).transpose(1, 2), y)

    assert told(model, tags, IssueType.BAD_TARGETS) == []
    assert told(model, hidden, IssueType.BAD_TARGETS) == []


def test_an_encoder_of_another_text_may_see_all_of_it():
    """Of encoder and decoder only the decoder's own attention must not see the next word."""
    for causal in (False, True):
        both = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True)
        table, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        model = nn.ModuleList([table, both, last])
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if causal else None

        def loss(table=table, both=both, last=last, mask=mask):
            x, y = texts()[:, :LENGTH], texts()
            scores = last(both(table(x), table(y[:, :-1]), tgt_mask=mask))
            return F.cross_entropy(scores.transpose(1, 2), y[:, 1:])

        found = told(model, loss, IssueType.BAD_TARGETS)
        assert found == ([] if causal else [("1.decoder.layers.0.self_attn",)])


class Coder(nn.Module):
    """An autoencoder whose code is drawn or rounded."""

    def __init__(self, how, *, beside=False):
        super().__init__()
        self.how, self.beside = how, beside
        self.mean, self.spread = nn.Linear(6, 3), nn.Linear(6, 3)
        self.decode = nn.Sequential(nn.Linear(5 if beside else 3, 8), nn.ReLU(), nn.Linear(8, 6))

    def loss(self):
        x = torch.randn(16, 6)
        mean, std = self.mean(x), self.spread(x).exp()
        code = {
            "rsample": lambda: Normal(mean, std).rsample(),
            "sample": lambda: Normal(mean, std).sample(),
            "independent": lambda: Independent(Normal(mean, std), 1).sample(),
            "torch.normal": lambda: torch.normal(mean, std),
            "round": lambda: mean.round() + 0.0 * std.round(),
            "straight through": lambda: mean + (mean.round() - mean).detach(),
            "detached": mean.detach,
        }[self.how]()
        decoded = self.decode(torch.cat([code, x[:, :2]], 1) if self.beside else code)
        return F.mse_loss(decoded, x) + 0.1 * (mean**2 + std**2 - 2 * std.log()).mean()


@pytest.mark.parametrize(("how", "beside"), [
    ("sample", False), ("sample", True), ("independent", False), ("torch.normal", False), ("round", False),
])  # fmt: skip
def test_a_code_that_was_drawn_or_rounded_is_told_at_what_made_it(how, beside):
    """A draw without a graph is NOT_TRAINING at its encoder, though a divergence trains that."""
    model = Coder(how, beside=beside)
    (layers,) = told(model, model.loss, IssueType.NOT_TRAINING)
    assert set(layers) == {"mean", "spread", "decode.0"}


@pytest.mark.parametrize("how", ["rsample", "straight through", "detached"])
def test_a_code_that_passes_gradients_or_is_detached_on_purpose_is_none(how):
    """What is drawn by rsample, rounded straight through, or detached by that name, is meant so."""
    model = Coder(how)
    assert told(model, model.loss, IssueType.NOT_TRAINING) == []


def test_an_action_whose_likelihood_is_used_may_be_given_to_a_critic():
    """A score function needs a draw without a graph, and asks for its log-probability."""
    actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
    model = nn.ModuleList([actor, critic])

    def loss():
        x = torch.randn(16, 4)
        policy = Normal(actor(x), 0.3)
        action = policy.sample()
        value = critic(torch.cat([x, action], 1))[:, 0]
        return F.mse_loss(value, -action.pow(2).sum(1)) - (policy.log_prob(action).sum(1) * value.detach()).mean()

    assert told(model, loss, IssueType.NOT_TRAINING) == []


def test_a_critic_that_is_told_of_drawn_actions_may_teach_the_actor_by_others():
    """Draws explore; where the same layer passes a gradient on to the actor elsewhere, none is missed."""
    actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
    model = nn.ModuleList([actor, critic])

    def loss():
        x = torch.randn(16, 4)
        mean = actor(x)
        action = Normal(mean, 0.3).sample()
        value, best = (critic(torch.cat([x, a], 1))[:, 0] for a in (action, mean))
        return F.mse_loss(value, -action.pow(2).sum(1)) - best.mean()

    assert told(model, loss, IssueType.NOT_TRAINING) == []


class Stack(nn.Module):
    """Layers behind or beside each other, of which some may be one."""

    def __init__(self, layers, how):
        super().__init__()
        self.layers, self.how, self.last = nn.ModuleList(layers), how, nn.Linear(6, 2)
        self.own = nn.ModuleList(nn.Linear(6, 6) for _ in layers)

    def forward(self, x):
        if self.how == "behind":
            for layer in self.layers:
                x = x + layer(x).relu()
            return self.last(x)
        if self.how == "beside":
            return self.last(sum(layer(x).relu() for layer in self.layers))
        return self.last(sum(layer(own(x).relu()) for layer, own in zip(self.layers, self.own, strict=True)))


@pytest.mark.parametrize(("how", "same", "wrong"), [
    ("behind", True, True), ("beside", True, True), ("behind", False, False), ("of each its own", True, False),
])  # fmt: skip
def test_one_layer_several_times_in_a_list_is_told(how, same, wrong):
    """``[layer] * 3`` behind each other, or given the same, is CAPACITY; heads of different layers may be one."""
    layer = nn.Linear(6, 6)
    model = Stack([layer] * 3 if same else [nn.Linear(6, 6) for _ in range(3)], how)

    def loss():
        x = torch.randn(16, 6)
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    assert told(model, loss, IssueType.CAPACITY) == ([("layers.0",)] if wrong else [])


def test_a_layer_that_is_named_besides_or_called_often_is_shared_on_purpose():
    """What has a name of its own, or is registered once and called several times, is no mistake."""
    named = Stack([nn.Linear(6, 6)] * 3, "behind")
    named.block = named.layers[0]
    once = nn.ModuleDict({"block": nn.Linear(6, 6), "last": nn.Linear(6, 2)})
    once.forward = lambda x: once["last"](once["block"](once["block"](x).relu()).relu())
    for model in (named, once):

        def loss(model=model):
            x = torch.randn(16, 6)
            return F.cross_entropy(model(x), (x[:, 0] > 0).long())

        assert told(model, loss, IssueType.CAPACITY) == []


def thrown_away(model, loss):
    """Train; return the layers that were read to stand before an activation of which nothing is left."""
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=0.1), MemoryWriter()
    with Exporter(model, backends=[memory], strict=True).watch():
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    return {layer for record in memory.records for layer in record.facts.get("layer.discarded", {})}


class Throws(nn.Module):
    """Three layers; the result of the first activation may be thrown away, kept, or used beside the layer's own."""

    def __init__(self, how):
        super().__init__()
        self.how, self.kept = how, None
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.act = nn.GELU() if how == "module" else nn.ReLU()

    def forward(self, x):
        neighbours = torch.full((len(x), len(x)), 1.0 / len(x))
        x = self.first(x)
        if self.how == "used":
            x = self.act(x)
        elif self.how == "kept":
            self.kept = self.act(x)
        else:
            self.act(x)
        x = neighbours @ self.second(x) if self.how == "graph" else self.second(x)
        return self.last(x + self.second(x) if self.how == "used" else x)


@pytest.mark.parametrize("how", ["module", "function", "graph"])
def test_an_activation_that_is_thrown_away_is_told_at_the_layer_before(how):
    """``F.relu(x)`` whose result nobody takes is CAPACITY, in a network that bends nowhere as well."""
    for kind, wrong in ((how, True), ("used", False), ("kept", False)):
        model = Throws(kind)

        def loss(model=model):
            return F.cross_entropy(model(torch.randn(16, 6)), torch.randint(2, (16,)))

        found = told(model, loss, IssueType.CAPACITY)
        if kind != "kept":  # of which the graph says that two layers are one, whatever became of the activation
            assert [layers[0] for layers in found] == (["first"] if wrong else [])
        assert thrown_away(model, loss) == ({"first"} if wrong else set())


def test_an_activation_that_another_loss_takes_is_not_thrown_away():
    """A head of its own, whose loss is propagated back by itself, uses what the other head does without."""
    body, left, right = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
    model = nn.ModuleList([body, left, right])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(8):
            optimizer.zero_grad()
            h = body(torch.randn(16, 6))
            losses = [F.cross_entropy(scores, torch.randint(2, (16,))) for scores in (left(h), right(h.relu()))]
            losses[0].backward(retain_graph=True)
            losses[1].backward()
            optimizer.step()
    assert [issue for issue in exporter.issues if issue.issue_type == IssueType.CAPACITY] == []


def test_watching_draws_and_repeated_layers_changes_nothing():
    """Weights are equal bit for bit, and every method and hook is back in its place."""

    def train(*, watched):
        torch.manual_seed(1)
        model = Coder("sample")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        exporter = Exporter(model, backends=[MemoryWriter()], strict=True)
        if watched:
            exporter.watch()
        for _ in range(12):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
        exporter.close()
        return list(model.parameters())

    methods = Normal.sample, Normal.log_prob, Independent.sample
    assert all(torch.equal(a, b) for a, b in zip(train(watched=True), train(watched=False), strict=True))
    assert (Normal.sample, Normal.log_prob, Independent.sample) == methods


class Pools(nn.Module):
    """Sums the places of each sample, weighed by scores that a softmax spreads over some dimension."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.words, self.score, self.head = dim, nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, x):
        words = torch.tanh(self.words(x))
        weights = self.score(words).squeeze(-1).softmax(self.dim)
        return self.head((words * weights.unsqueeze(-1)).sum(1))


@pytest.mark.parametrize(("dim", "layers"), [(0, [("score",)]), (1, [])])
def test_a_softmax_over_the_samples_is_told_of_scores_with_two_dimensions(dim, layers):
    """One score per place: over the places it is attention, over the samples a mistake."""
    model = Pools(dim)
    x, y = torch.randn(16, 12, 8), torch.randint(4, (16,))
    assert told(model, lambda: F.cross_entropy(model(x), y), IssueType.WRONG_LOSS) == layers


class Chooses(nn.Module):
    """Has a softmax run over the samples, and uses what it gives in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body, self.gate = how, nn.Linear(8, 12), nn.Linear(8, 4)
        self.heads = nn.ModuleList(nn.Linear(12, 4) for _ in range(4))

    def forward(self, x):
        h, shares = torch.tanh(self.body(x)), self.gate(x).softmax(0)
        outs = torch.stack([head(h) for head in self.heads], 1)
        return {
            "mixture": lambda: (shares[:, :, None] * outs).sum(1),
            "mixture, by columns": lambda: sum(shares[:, i : i + 1] * outs[:, i] for i in range(4)),
            "mixture, by a product": lambda: (shares[:, None] @ outs)[:, 0],
            "layer": lambda: shares @ outs[0],
            "what all have in common": lambda: outs[:, 0] + (shares[:, :1] * outs[:, 1]).sum(0),
            "by a product, in common": lambda: outs[:, 0] + (shares.t() @ outs[:, 1]).mean(0),
        }[self.how]()


WITHIN = ("mixture", "mixture, by columns", "mixture, by a product", "layer")
IN_COMMON = ("what all have in common", "by a product, in common")


@pytest.mark.parametrize("how", WITHIN + IN_COMMON)
def test_shares_of_samples_that_stay_with_their_sample_are_told(how):
    """What is chosen from samples, as from nodes of one graph, is added up over them; else samples compete."""
    model = Chooses(how)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    found = told(model, lambda: F.cross_entropy(model(x), y), IssueType.WRONG_LOSS)
    assert found == ([("gate",)] if how in WITHIN else [])
