"""The programs about Fashion-MNIST: training, and an image of one's own; their page is tested apart."""

import os
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from ipu_pipeline import datasets
from tests.support.idx_files import write_mnist
from tests.support.programs import run
from tests.support.terminals import Terminal
from tests.support.tutorial_modules import POPTORCH, imported, run_main

FOLDER = POPTORCH / "fashion_mnist"
pytestmark = pytest.mark.thorough  # to import the programs takes seconds: scikit-learn, matplotlib
torch.set_num_threads(1)  # as train.py does


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """The programs, which import each other, while these tests run."""
    global train, classify, classifier
    with imported(FOLDER, "train", "classify", "classifier", "pictures") as found:
        train, classify, classifier, _pictures = found
        yield


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, without Fashion-MNIST."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(datasets.FASHION_DIR_VARIABLE, raising=False)
    return tmp_path


def check_refused(program, patch, capsys, options, message):
    """A program ends early, with one line on the standard error that begins with a message."""
    with pytest.raises(SystemExit) as ended:
        program.exit_on_error(lambda: run_main(program, patch, *options.split()))
    error = capsys.readouterr().err
    assert error.startswith(f"Error: {message}")
    assert (ended.value.code, error.count("\n")) == (1, 1), error


def save_image(path, size=(40, 50), value=128):
    Image.new("L", size, value).save(path)
    return path


def test_training_and_an_image_of_ones_own(here, rng):
    """A copy of the programs somewhere else, as a user starts them."""
    copy = here / "copy of mine"
    shutil.copytree(FOLDER, copy)
    write_mnist(here / "fashion", rng, num_train=13, num_test=5)
    own = {"folder": here, "as_tests": True, datasets.FASHION_DIR_VARIABLE: str(here / "fashion")}
    options = ["--epochs=2", "--batch-size=2", "--device-iterations=3", "--test-batch-size=4"]
    lines = run("-W", "error", copy / "train.py", *options, **own).splitlines()
    folder = here / "fashion"
    assert lines[0] == f"Data set: Fashion-MNIST, since IPU_PIPELINE_FASHION_DIR gives the folder {folder}"
    pattern = re.compile(r"Epoch \d: mean loss (\d\.\d{3}); \d+\.\d calls/s, [\d,]+ images/s")
    epochs = [pattern.fullmatch(line) for line in lines[1:3]]
    assert 1.5 < float(epochs[1][1]) < float(epochs[0][1]) < 4
    assert lines[3] == "Weights: classifier.pth"
    percent, num_right = re.fullmatch(r"Test accuracy: (\S+)% \((\d) of 5 images\)", lines[4]).groups()
    assert float(percent) == 20 * int(num_right)
    assert re.fullmatch(rf"Recognized most: ({'|'.join(datasets.CLOTHES)}), \d+\.0%", lines[5])
    assert lines[6].startswith("Recognized least: ")
    assert lines[7:] == ["Confusion matrix: confusion_matrix.png", "Program ran successfully"]
    with Image.open(here / "confusion_matrix.png") as image:
        assert image.format == "PNG"
    assert not list(here.glob("*.part"))

    save_image(here / "own.png")
    printed = run("-W", "error", copy / "classify.py", "own.png", "--picture", "both.SVG", **own)
    lines = printed.splitlines()
    answer = re.fullmatch(r"On the device: (.+ \(\d+\.\d%\))", lines[0])[1]
    assert lines[1:] == [f"In plain torch: {answer}", "Before and after: both.SVG"]
    model = classifier.load_weights(here / "classifier.pth").eval()
    pixels = torch.full((1, 1, 28, 28), (128 / 255 - 0.5) / 0.5)
    with torch.no_grad():
        probability, label = model(pixels).exp().max(dim=1)
    assert answer == f"{datasets.CLOTHES[label]} ({float(probability):.1%})"
    assert "<svg" in (here / "both.SVG").read_text()


def test_options(monkeypatch):
    def parse(arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments.split()])
        args = train.parse_arguments()
        options = train.make_training_options(args, 60_000)
        accumulation = options.Training.gradient_accumulation
        values = options.device_iterations, options.replication_factor, accumulation, options.random_seed
        return args, values

    args, options = parse("")
    assert (args.batch_size, args.epochs, args.learning_rate, args.test_batch_size) == (16, 5, 0.001, 32)
    assert options == (1, 1, 1, 0)
    _args, options = parse("--device-iterations 20 --replicas 2 --gradient-accumulation 3 --seed 7")
    assert options == (20, 2, 3, 7)
    with pytest.raises(ValueError, match=r"--device-iterations 4000 x .* --batch-size 16 = 64,000 images"):
        parse("--device-iterations 4000")


def test_what_training_refuses_before_it_begins(here, rng, monkeypatch, capsys):
    write_mnist(here / "damaged", rng)
    path = here / "damaged" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    write_mnist(here / "few", rng)
    (here / "few" / "t10k-labels-idx1-ubyte.gz").unlink()
    (here / "link.pth").symlink_to(here / "gone" / "weights.pth")
    for options, message in [
        ("--dataset fashion", "--dataset fashion: no folder was given. Give --data-dir, or set"),
        ("--data-dir few", "Fashion-MNIST: the folder few has no t10k-labels-idx1-ubyte.gz."),
        ("--data-dir nowhere", "Fashion-MNIST: the folder nowhere has no train-images-idx3"),
        ("--data-dir damaged", "Fashion-MNIST: damaged/train-images-idx3-ubyte.gz is not a com"),
        ("--dataset digits --data-dir few", "--data-dir few has no use with --dataset"),
        ("--weights no/where.pth", "no/where.pth: there is no folder no."),
        ("--weights few", "few is a folder or a device; give the path of a file."),
        ("--weights /dev/null", "/dev/null is a folder or a device; give the path of a file."),
        ("--weights link.pth", f"link.pth: there is no folder {here / 'gone'}."),
        ("--confusion-matrix matrix.txt", "matrix.txt: the name of a picture must end in"),
        ("--confusion-matrix matrix", "matrix: the name of a picture must end in one of .png, "),
        ("--batch-size 1438", "A call takes --device-iterations 1 x --gradient-accumulation 1"),
    ]:
        check_refused(train, monkeypatch, capsys, options, message)
    assert not list(here.glob("*.png"))


def test_weights_in_a_file(here):
    torch.manual_seed(5)
    model = classifier.ClassificationModel(datasets.DIGITS)
    path = here / "link.pth"
    path.symlink_to(here / "weights.pth")
    classifier.save_weights(model, path)
    assert path.is_symlink()
    found = classifier.load_weights(path)
    assert found.classes == datasets.DIGITS
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))
    before = path.read_bytes()

    def fail(stream):
        stream.write(b"half")
        raise OSError(28, "no place")

    with pytest.raises(OSError, match="no place"):
        classifier.write_whole(path, fail)
    assert path.read_bytes() == before
    assert sorted(file.name for file in here.iterdir()) == ["link.pth", "weights.pth"]


def test_what_is_no_weights_of_the_model(here, monkeypatch, capsys):
    save_image(here / "own.png")
    state = classifier.ClassificationModel().state_dict()
    torch.save(torch.nn.Linear(2, 2).state_dict(), here / "other.pth")
    torch.save({**state, "fc1.weight": torch.zeros(100, 320)}, here / "shape.pth")
    torch.save({**state, "_extra_state": ["one", "two"]}, here / "classes.pth")
    torch.save(torch.zeros(3), here / "tensor.pth")
    torch.save(classifier.ClassificationModel(), here / "whole.pth")
    classifier.save_weights(classifier.ClassificationModel(), here / "cut.pth")
    (here / "cut.pth").write_bytes((here / "cut.pth").read_bytes()[:-1000])
    (here / "empty.pth").touch()
    for name, message in [
        ("missing.pth", ": there are no weights. train.py writes them; --weights says where."),
        ("other.pth", " has no weights of this model, which are _extra_state, conv1.weight, "),
        ("tensor.pth", " has no weights of this model, which are "),
        ("shape.pth", " has weights of another model: its fc1.weight is not as it is here."),
        ("classes.pth", " has weights of another model: its _extra_state is not as it is here."),
        ("whole.pth", " has no weights that can be read: it is damaged, or no file of torch's."),
        ("cut.pth", " has no weights that can be read"),
        ("empty.pth", " has no weights that can be read"),
    ]:
        check_refused(classify, monkeypatch, capsys, f"own.png --weights {name}", name + message)
    check_refused(classify, monkeypatch, capsys, "own.png --weights .", "Is a directory: '.'\n")
    assert not (here / "classified.png").exists()


def test_what_is_no_image(here, monkeypatch, capsys):
    save_image(here / "own.png", size=(300, 300))
    whole = (here / "own.png").read_bytes()
    (here / "cut.png").write_bytes(whole[: len(whole) // 2])
    (here / "changed.png").write_bytes(whole[:60] + bytes(20) + whole[80:])
    (here / "text.jpg").write_text("no image")
    (here / "empty.jpg").touch()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40_000)
    for options, message in [
        ("nothing.jpg", "No such file or directory: 'nothing.jpg'"),
        (".", "Is a directory: '.'"),
        ("text.jpg", "text.jpg is no image that pillow can read."),
        ("empty.jpg", "empty.jpg is no image that pillow can read."),
        ("own.png", "own.png is a damaged image, or too large a one: Image size (90000 pixels) exceeds"),
        ("own.png --picture x.y", "x.y: the name of a picture must end in one of"),
    ]:
        check_refused(classify, monkeypatch, capsys, options, message)
    monkeypatch.undo()
    for name in ("cut.png", "changed.png"):
        with pytest.raises(ValueError, match=f"{name} is a damaged image"):
            classify.read_image(here / name)


def picture(value_of_corner=0):
    """Light on dark, 60 x 40: a quarter of the image at the top left is lighter."""
    pixels = np.full((40, 60), 20, np.uint8)
    pixels[:20, :30] = 150
    pixels[:5, :5] = value_of_corner
    return pixels


def test_images_of_all_modes(here):
    for mode in ("L", "1", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr", "HSV", "I;16", "I", "F"):
        pixels = picture()
        if mode == "1":
            pixels = np.where(pixels > 100, np.uint8(255), np.uint8(0))
        expected = classify.prepare(Image.fromarray(pixels))
        if mode == "I;16":
            image, kind = Image.fromarray(pixels.astype(np.uint16) * 257), "png"
        elif mode in ("I", "F"):
            image, kind = Image.fromarray(pixels.astype({"I": np.int32, "F": np.float32}[mode])), "tiff"
        else:
            image = Image.fromarray(pixels).convert(mode)
            kind = {"YCbCr": "jpg", "CMYK": "tiff"}.get(mode, "png")
        path = here / f"image.{kind}"
        image.convert("RGB").save(path) if mode == "HSV" else image.save(path)
        found = classify.prepare(classify.read_image(path))
        assert (found.mode, found.size) == ("L", (28, 28))
        tolerance = 6 if mode == "YCbCr" else 2  # JPEG loses some
        difference = np.abs(np.asarray(found, int) - np.asarray(expected, int))
        assert difference.max() <= (40 if mode == "YCbCr" else tolerance), mode
        assert difference.mean() <= tolerance, mode


def test_sixteen_bits_and_floats_are_not_cut_off():
    for pixels, expected in [
        (np.array([[0, 32768, 65535]], np.uint16), [0, 128, 255]),
        (np.array([[0, 100, 255]], np.int32), [0, 100, 255]),
        (np.array([[-5, 65535, 300]], np.int32), [0, 255, 1]),
        (np.array([[0, 500_000, 1_000_000]], np.int32), [0, 128, 255]),
        (np.array([[0, 0.5, 1]], np.float32), [0, 128, 255]),
        (np.array([[0, np.nan, 51]], np.float32), [0, 0, 51]),
        (np.zeros((1, 3), np.float32), [0, 0, 0]),
    ]:
        assert np.asarray(classify._narrow(Image.fromarray(pixels))).tolist() == [expected]


def test_light_corners_are_background():
    dark = Image.fromarray(picture())
    light = Image.fromarray(255 - picture())
    for image in (dark, light):
        prepared = np.asarray(classify.prepare(image), int)
        np.testing.assert_array_equal(prepared[:12, 5:12] > 140, True)
        np.testing.assert_array_equal(prepared[16:, 16:], 20)
    corner = Image.new("L", (28, 28), 90)
    for value, inverted in [(200, False), (201, True)]:
        corner.putpixel((1, 1), value)
        assert (classify.prepare(corner).getpixel((20, 20)) == 255 - 90) is inverted


def test_transparent_is_white_and_images_are_upright(here):
    image = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    image.paste((200, 0, 0, 255), (10, 10, 30, 30))
    image.save(here / "cut_out.png")
    palette = image.convert("RGB").quantize(4)
    palette.save(here / "palette.png", transparency=palette.getpixel((0, 0)))
    for name in ("palette.png", "cut_out.png"):
        found = classify.read_image(here / name)
        assert (found.getpixel((0, 0)), found.getpixel((20, 20))) == ((255, 255, 255), (200, 0, 0))
    assert classify.prepare(found).getpixel((1, 1)) == 0

    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side
    Image.fromarray(picture()).save(here / "turned.png", exif=exif)
    found = classify.read_image(here / "turned.png")
    assert found.size == (40, 60)
    assert found.getpixel((35, 10)) == 150


def test_what_to_install(monkeypatch):
    for name in ("matplotlib", "sklearn"):
        with monkeypatch.context() as patch:
            for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
                patch.delitem(sys.modules, loaded)
            patch.setitem(sys.modules, name, None)
            patch.delitem(sys.modules, "pictures")
            with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context():
                __import__("pictures")
        command = "pip install scikit-learn==1.9.1 matplotlib==3.11.2"
        assert ended.value.code.startswith(f"Error: there is no module {name}")
        assert ended.value.code.endswith(f"Run: {command}")


@pytest.mark.soak
def test_ctrl_c_in_training(here):
    """In the middle of an epoch, which takes seconds: an interrupted constructor of tqdm leaves its bar."""
    options = ("--dataset", "digits", "--batch-size", "1", "--weights", here / "weights.pth")
    terminal = Terminal(FOLDER / "train.py", *options, "--confusion-matrix", here / "matrix.png")
    terminal.read_until("loss=")
    terminal.interrupt()
    code, lines = terminal.finish()
    assert (code, lines[-2:]) == (130, ["Interrupted.", ""])
    assert not [line for line in lines if "Traceback" in line]
    assert not list(here.iterdir())


@pytest.mark.soak
@pytest.mark.skipif(
    datasets.FASHION_DIR_VARIABLE not in os.environ, reason="IPU_PIPELINE_FASHION_DIR is not set"
)
def test_five_epochs_of_fashion_mnist(tmp_path, monkeypatch, optimized):
    monkeypatch.chdir(tmp_path)
    printed = run_main(train, monkeypatch, "--dataset", "fashion")
    assert float(re.search(r"Test accuracy: (\S+)%", printed)[1]) >= 88
    assert "of 10000 images" in printed
    assert re.search(r"Recognized least: (Shirt|Pullover|T-shirt|Coat), ", printed)  # rounding decides
