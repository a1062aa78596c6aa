"""Trains a BERT and a BART with optimum-graphcore, as on IPUs, and then by plain torch; see its test.

It has nothing of this library: `ipu-pipeline run` runs it, with a folder for files.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from optimum.graphcore import (
    IPUConfig,
    IPUSeq2SeqTrainer,
    IPUSeq2SeqTrainingArguments,
    IPUTrainer,
    IPUTrainingArguments,
)
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForSequenceClassification
from transformers.optimization import AdamW as AdamWithoutCorrection

FOLDER = Path(sys.argv[1])
RATE, ITERATIONS, ACCUMULATION, ROWS = 2e-3, 2, 2, 2
IPU_CONFIG = {
    "ipus_per_replica": 2,
    "gradient_accumulation_steps": ACCUMULATION,
    "device_iterations": ITERATIONS,
    "output_mode": "all",
}
SETTINGS = {
    "max_steps": 4,
    "per_device_train_batch_size": ROWS,
    "per_device_eval_batch_size": ROWS,
    "dataloader_drop_last": True,
    "learning_rate": RATE,
    "adam_epsilon": 1e-4,  # so that gradients that are nothing but rounding change nothing
    "fp32": True,
    "save_steps": 2,
    "report_to": "none",
    "disable_tqdm": True,
}


class _Recording:
    """A trainer that keeps each call's batch, rate and loss."""

    def training_step(self, model, inputs):
        vars(self).setdefault("calls", [])
        rate = self.lr_scheduler.get_last_lr()[0]
        loss = super().training_step(model, inputs)
        self.calls.append((dict(inputs), rate, loss.item()))
        return loss


class Trainer(_Recording, IPUTrainer):
    pass


class Seq2SeqTrainer(_Recording, IPUSeq2SeqTrainer):
    pass


def draw(*shape):
    return torch.randint(3, 60, shape)


def trained_plainly(model, optimizer, calls):
    """The mean loss of each call."""
    model.train()
    losses = []
    for inputs, rate, _loss in calls:
        for group in optimizer.param_groups:
            group["lr"] = rate
        parts = {name: tensor.split(ROWS) for name, tensor in inputs.items()}
        micro_batches = [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]
        assert len(micro_batches) == ITERATIONS * ACCUMULATION
        of_call = []
        for number, micro_batch in enumerate(micro_batches, start=1):
            loss = model(**micro_batch)[0]
            (loss / ACCUMULATION).backward()
            of_call.append(loss.item())
            if number % ACCUMULATION == 0:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(sum(of_call) / len(of_call))
    return losses


def tokens(rows, start):
    return torch.tensor([row["input_ids"] for row in rows[start : start + ROWS]])


def classify(folder):
    """With PopTorch's optimizer from torch's, checkpoints, and a continued run."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=60, num_labels=3, **sizes, **dropout))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = [{"input_ids": row.tolist(), "label": int(row[0]) % 3} for row in draw(32, 12)]

    def make_optimizer():
        model.load_state_dict(start)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=RATE, weight_decay=0.1)

    def make_trainer():
        return Trainer(
            model=model,
            args=IPUTrainingArguments(output_dir=str(folder), **SETTINGS),
            ipu_config=IPUConfig(layers_per_ipu=[1, 1], **IPU_CONFIG),
            optimizers=(make_optimizer(), None),
            train_dataset=rows,
            eval_dataset=rows[:4],
            compute_metrics=lambda found: {"shape": list(found.predictions.shape)},
        )

    trainer = make_trainer()
    trainer.train()
    evaluated, predicted = trainer.evaluate(), trainer.predict(rows[:4])
    trainer.save_model()
    again = make_trainer()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    plain_losses = trained_plainly(model, make_optimizer(), trainer.calls)
    read = BertForSequenceClassification.from_pretrained(folder).eval()
    labels = torch.tensor([row["label"] for row in rows[:4]])
    with torch.no_grad():
        outputs = read(torch.cat([tokens(rows, 0), tokens(rows, ROWS)]), labels=labels)
    return {
        "losses": [loss for _inputs, _rate, loss in trainer.calls],
        "losses of plain torch": plain_losses,
        "losses after a checkpoint": [loss for _inputs, _rate, loss in again.calls],
        "evaluated": [evaluated["eval_loss"], predicted.metrics["test_loss"]],
        "evaluated by plain torch": outputs.loss.item(),
        "shape": evaluated["eval_shape"],
        "predictions": predicted.predictions.tolist(),
        "predictions of plain torch": outputs.logits.tolist(),
        "weights": _norms(trainer.model),
        "weights after a checkpoint": _norms(again.model),
        "weights of plain torch": _norms(model),
    }


def translate(folder):
    """With the trainer's own optimizer. It generates on the devices, also between calls that train."""
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    config = BartConfig(vocab_size=60, d_model=32, init_std=0.5, max_length=6, **heads, **layers, **dropout)
    model = BartForConditionalGeneration(config)
    rows = [{"input_ids": row.tolist(), "labels": row[:5].tolist()} for row in draw(32, 8)]
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = Seq2SeqTrainer(
        model=model,
        args=IPUSeq2SeqTrainingArguments(
            output_dir=str(folder),
            predict_with_generate=True,
            evaluation_strategy="steps",
            eval_steps=2,
            **SETTINGS,
        ),
        ipu_config=IPUConfig(
            layers_per_ipu=[1, 1],
            inference_parallelize_kwargs={"use_cache": True, "batch_size": ROWS, "max_length": 6},
            **IPU_CONFIG,
        ),
        train_dataset=rows,
        eval_dataset=rows[:4],
        compute_metrics=lambda found: {"shape": list(found.predictions.shape)},
    )
    trainer.train()
    predicted = trainer.predict(rows[:4])
    trainer.save_model()
    model.load_state_dict(start)
    optimizer = AdamWithoutCorrection(
        model.parameters(),
        RATE,
        eps=SETTINGS["adam_epsilon"],
        correct_bias=False,
        no_deprecation_warning=True,
    )
    read = BartForConditionalGeneration.from_pretrained(folder).eval()
    generated = [read.generate(tokens(rows, start), max_length=6) for start in (0, ROWS)]
    return {
        "losses": [loss for _inputs, _rate, loss in trainer.calls],
        "losses of plain torch": trained_plainly(model, optimizer, trainer.calls),
        "predictions": predicted.predictions.tolist(),
        "predictions of plain torch": torch.cat(generated).tolist(),
    }


def _norms(model):
    """Of the parameters but those that have no gradient but by rounding: keys' biases."""
    named = [item for item in model.named_parameters() if "key.bias" not in item[0]]
    return [parameter.detach().double().norm().item() for _name, parameter in named]


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(1)
    results = {part.__name__: part(FOLDER / part.__name__) for part in (classify, translate)}
    (FOLDER / "results.json").write_text(json.dumps(results))
