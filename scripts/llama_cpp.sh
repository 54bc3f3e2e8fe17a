#!/usr/bin/env bash
# Make a virtual environment with llama.cpp, built for this machine, for the benchmark of decoding; does nothing when it
# is there already. The wheel of llama-cpp-python would build programs too, for half an hour: this builds its library
# alone, some 80 files, and takes minutes. Usage: scripts/llama_cpp.sh [FOLDER]; the benchmark looks where LLAMA_CPP says.
set -eu
version=0.3.36
venv=${1:-${LLAMA_CPP:-build/llama.cpp}}
python=${PYTHON:-python3}

if "$venv/bin/python" -c 'import gguf, llama_cpp' 2>/dev/null; then exit 0; fi
if ! command -v c++ >/dev/null 2>&1; then
  echo "a C++ compiler is needed; on Debian: apt-get install g++" >&2
  exit 2
fi

echo "1/3 a virtual environment in $venv: gguf, cmake, ninja" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
venv=$(cd "$venv" && pwd)
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet gguf cmake ninja numpy typing-extensions diskcache jinja2  # the last four: what llama_cpp imports

source=$venv/src/llama_cpp_python-$version
if [ ! -d "$source" ]; then
  echo "2/3 the sources of llama-cpp-python $version, with llama.cpp in them (90 MB)" >&2
  mkdir -p "$venv/src"
  pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$venv/src" "llama-cpp-python==$version"
  tar -xzf "$source.tar.gz" -C "$venv/src"
  rm "$source.tar.gz"
fi

echo "3/3 libllama, with -O3 -march=native" >&2
PATH=$venv/bin:$PATH
cmake -S "$source/vendor/llama.cpp" -B "$source/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
  -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
  -DLLAMA_OPENSSL=OFF >"$source/configured.log"
cmake --build "$source/build" --target llama
ln -sfn ../build/bin "$source/llama_cpp/lib"  # where the Python part looks for it
echo "$source" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/llama_cpp.pth"
"$venv/bin/python" -c 'import gguf, llama_cpp; print(llama_cpp.llama_print_system_info().decode())' >&2
