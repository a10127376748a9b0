"""A small BERT-like sentence classifier."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class SentenceClassifier(nn.Module):
    def __init__(self, vocab_size, hidden_size=32, num_layers=2, num_heads=4, max_length=64, num_labels=2, dropout=0.1):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(max_length, hidden_size)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            hidden_size, num_heads, dim_feedforward=2 * hidden_size, dropout=dropout, activation="gelu",
            batch_first=True, norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, num_layers, norm=nn.LayerNorm(hidden_size), enable_nested_tensor=False,
        )
        self.classifier = nn.Linear(hidden_size, num_labels)
        nn.init.normal_(self.position_embeddings.weight, std=0.1)

    def forward(self, input_ids, attention_mask, labels=None):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.word_embeddings(input_ids) + self.position_embeddings(positions))
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1).to(x.dtype)
        pooled = (x * weights).sum(dim=1) / weights.sum(dim=1)
        logits = self.classifier(self.dropout(pooled))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}
