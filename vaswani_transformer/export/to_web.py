"""A site that translates without a server: the page of `vaswani serve`, with the model in the browser."""

import base64
import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path
from urllib.request import urlopen

from ..data.tokenization import load_tokenizer
from ..errors import UserError, reading
from ..exported import FACTS
from ..files import cache_folder
from ..json_and_yaml import read_json
from ..model.language_codes_vaswani import LanguageCodes
from ..output_folder import written_at_once
from .exporting import TRANSFORMERS_JS, Export, export_model, size_of

_ENGINE = "ort-wasm-simd-threaded.asyncify"
# Of npm, by version and hash; transformers.js names the version of onnxruntime-web that it needs.
_PACKAGES = {
    "@huggingface/transformers/-/transformers-4.3.1.tgz": (
        "5+voSeUCFK6PCKlY15dPhNOKq3/zOTxDN7oC+Wy9dFb1QZ0TSQomZRRy7URRK8YRuUoE9fGMQTTPC5d/pWBJhA==",
        ("transformers.min.js",),
    ),
    "onnxruntime-web/-/onnxruntime-web-1.31.0-dev.20260914-8d85527a0.tgz": (
        "Iy7rtadoBgxS/LLvDr3QW38DB1PNXRnr0GJMcL0TAt7c9qjgVQl83UlGCVyeAnK2InpmW8Uc3PL8XIuqtDeF6g==",
        (f"{_ENGINE}.mjs", f"{_ENGINE}.wasm"),
    ),
}
_LARGEST = 200 * 10**6  # bytes of a model, which each visitor loads
_HEAD = """\
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none';\
 script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; connect-src 'self'; worker-src 'self';\
 manifest-src 'self'">
<link rel="manifest" href="manifest.json">"""


def export_site(
    model: str | Path, output: str | Path, languages: tuple[str, str], quantization: str | None = None, overwrite=False
) -> Export:
    """Write a folder of static files that any web server can serve, and compare the model in it with the original.

    The `languages` are codes of source and target, the quantization is int8 (the default) or float32; the others and
    errors as in `export_model`. `UserError` also for a model too large for a page, and without the registry of npm.
    """
    with written_at_once(output := Path(output), overwrite, last=FACTS) as staging:
        result = export_model(model, staging / "model", TRANSFORMERS_JS, quantization)
        dtype = "fp32" if quantization == "float32" else "q8"
        for graph in (staging / "model" / "onnx").iterdir():
            if dtype == "q8" and "_quantized" not in graph.name:
                graph.unlink()
        if (size := size_of(staging)) > _LARGEST:
            raise UserError(f"{model} takes {size / 1e6:,.0f} MB, and a page at most {_LARGEST / 1e6:,.0f}: too large")
        codes = LanguageCodes(load_tokenizer(model))
        with reading(model):
            code = f"{codes.code(languages[1])} " if codes.known else ""
        _add_page(staging, languages, result.positions, dtype, code)
        for package, (integrity, names) in _PACKAGES.items():
            _add_package(staging / "lib", package, integrity, names)
        files = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("[!.]*") if path.is_file())
        hashes = {name: f"sha512-{_integrity(staging / name)}" for name in files}
        version = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
        hashes |= {"./": "", "index.html": ""}  # to which some hosts add a script of theirs
        worker = (Path(__file__).with_name("web") / "service-worker.js").read_text("utf-8")
        worker = worker.replace("{version}", version).replace("{files}", json.dumps(hashes))
        (staging / "service-worker.js").write_text(worker, "utf-8")
        # Of a Space. Not every server has such a file, and a browser keeps all files of the list or none.
        (staging / "README.md").write_text("---\ntitle: Translate\nsdk: static\n---\n", "utf-8")
        shutil.copy(staging / "model" / FACTS, staging / FACTS)
    return result._replace(folder=output.absolute(), bytes=size_of(output))


def _add_page(folder: Path, languages: tuple[str, str], positions: int, dtype: str, code: str) -> None:
    """Write the page, with the worker in a server's place, and what both have to know."""
    extra = read_json(folder / "model" / "generation_config.json").get("max_extra_tokens", 50)
    site = {"characters": 20_000, "positions": positions, "dtype": dtype, "extra": extra, "code": code}
    site |= zip(("source", "target"), (language.replace("_", "-") for language in languages), strict=True)
    (folder / "site.json").write_text(json.dumps(site), "utf-8")
    serving, own = Path(__file__).parents[1] / "serving", Path(__file__).with_name("web")
    page = (serving / "page.html").read_text("utf-8").replace("<title>", f"{_HEAD}\n<title>")
    page = page.replace('<script src="page.js"', '<script src="engine.js" defer></script>\n<script src="page.js"')
    (folder / "index.html").write_text(page.replace("from this server", "with this site"), "utf-8")
    files = [serving / "page.css", serving / "page.js", own / "manifest.json", own / "icon.svg"]
    for file in (*files, own / "engine.js", own / "worker.js"):
        (folder / file.name).write_bytes(file.read_bytes())


def _add_package(folder: Path, package: str, integrity: str, names: tuple[str, ...]) -> None:
    """Copy files of an npm package, which is fetched once, into a folder."""
    archive = cache_folder("npm") / package.rpartition("/")[2]
    if not archive.is_file() or _integrity(archive) != integrity:  # or was cut off
        url = f"{os.environ.get('NPM_CONFIG_REGISTRY', 'https://registry.npmjs.org').rstrip('/')}/{package}"
        with reading(url), urlopen(url, timeout=60) as response:
            archive.write_bytes(response.read())
        if _integrity(archive) != integrity:
            raise UserError(f"{url} is not the package that was tested: its hash is another")
    folder.mkdir(exist_ok=True)
    with reading(archive), tarfile.open(archive) as packed:
        for name in names:
            # Not every server knows that .mjs is JavaScript.
            (folder / name.replace(".mjs", ".js")).write_bytes(packed.extractfile(f"package/dist/{name}").read())


def _integrity(path: Path) -> str:
    return base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
