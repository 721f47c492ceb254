#!/usr/bin/env bash
# The transfers on the real verbs code path without RDMA hardware: boots Debian's kernel, which has
# Soft-RoCE, in an emulated machine with what was built here, and runs tests/rdma/guest.sh in it.
#
#   tests/rdma/machine.sh BUILD RESULTS      RESULTS: folder for the counts
#
# Needs x86-64, QEMU and some room: the kernel's package (about 70 MB to fetch, 300 MB unpacked, kept in
# the cache), 2 GB of memory, 5 to 15 minutes, since every instruction is emulated. Speed means
# nothing here.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"
build=$ROOT_DIR/$1 results=$2
# BATON_TEST_RDMA_GUEST: another program for the machine.
limit=${BATON_TEST_RDMA_SECONDS:-1800}

[ "$(uname -m)" = x86_64 ] || die "the emulated machine is made for x86-64; this is $(uname -m)"
ensure_packages qemu-system-x86 busybox-static cpio kmod curl ibverbs-providers librdmacm1 libucx0 iproute2
work=$(mktemp -d "${TMPDIR:-/tmp}/baton-rdma.XXXXXX")
trap 'rm -rf "$work"' EXIT

# The kernel and its modules, unpacked and not installed. Sets kernel.
fetch_kernel() {
    local package dir
    package=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
    [ -n "$package" ] || return 1
    dir=$CACHE_DIR/rdma/$package
    kernel=$dir
    [ -f "$dir/complete" ] && return 0
    rm -rf "$dir"
    mkdir -p "$dir" &&
        (cd "$work" && apt-get download -q "$package" && dpkg-deb -x "$package"_*.deb "$dir") &&
        depmod -b "$dir" "${package#linux-image-}" &&
        touch "$dir/complete"
}
step "fetching Debian's kernel" fetch_kernel || exit 1
fetch_kernel
release=$(basename "$kernel"/lib/modules/*)
root=$work/root
mkdir -p "$root"/{bin,etc,proc,sys,dev,tmp,run,test,lib/modules/"$release"}

# add FILE...: with the libraries that it needs, where they are here.
add() {
    local f lib
    for f in "$@"; do
        mkdir -p "$root$(dirname "$f")"
        cp -L "$f" "$root$f"
        for lib in $(ldd "$f" 2>/dev/null | grep -o '/[^ ]*'); do
            [ -e "$root$lib" ] || { mkdir -p "$root$(dirname "$lib")" && cp -L "$lib" "$root$lib"; }
        done
    done
}

# The guest's root, all in memory.
make_root() {
    local module lib=/usr/lib/x86_64-linux-gnu b
    cp /bin/busybox "$root/bin/busybox" || return 1
    for module in veth crc32_generic rdma_rxe rdma_ucm ib_uverbs; do
        modprobe -d "$kernel" -S "$release" --show-depends "$module" | sed -n 's/^insmod //p'
    done | sort -u | while read -r module; do
        cp --parents "$module" "$root/"
    done
    # Where modprobe looks for them.
    mv "$root$kernel"/lib/modules/"$release"/* "$root/lib/modules/$release/"
    cp "$kernel"/lib/modules/"$release"/modules.{order,builtin} "$root/lib/modules/$release/"
    depmod -b "$root" "$release"
    for b in ip rdma curl; do
        add "$(command -v $b)"
        mv "$root$(command -v $b)" "$root/test/"
    done
    add "$lib"/ucx/libuct_ib.so.0 "$lib"/ucx/libuct_rdmacm.so.0 \
        "$lib"/libibverbs/librxe-rdmav34.so
    cp -L "$lib"/ucx/*.so "$root$lib/ucx/"
    mkdir -p "$root/etc/libibverbs.d" && cp /etc/libibverbs.d/rxe.driver "$root/etc/libibverbs.d/"
    for b in tests/rdma_check tests/test_handoff tests/test_handoff-crash baton-prefill baton-decode baton-router; do
        add "$build/$b"
        mv "$root$build/$b" "$root/test/"
    done
    cp "$ROOT_DIR/tests/data/tiny.gguf" "$root/test/"
    cp "${BATON_TEST_RDMA_GUEST:-$ROOT_DIR/tests/rdma/guest.sh}" "$root/init"
    chmod +x "$root/init"
    (cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initrd"
}
step "making the machine's root" make_root || exit 1

run_machine() {
    timeout "$limit" nice -n 5 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 2048 \
        -nographic -no-reboot -net none -kernel "$kernel/boot/vmlinuz-$release" -initrd "$work/initrd" \
        -append "console=ttyS0 quiet panic=-1" </dev/null | stdbuf -oL tr -d '\r' | tee "$work/console"
    # The guest's last line; a kernel that panics never writes it.
    grep -q '^guest: end' "$work/console"
}
status=0
run_machine || status=1
# "guest: ok NAME" and "guest: failed NAME"
{
    echo '<testsuite>'
    sed -n 's|^guest: ok \(.*\)|<testcase classname="rdma" name="\1"/>|p
            s|^guest: failed \(.*\)|<testcase classname="rdma" name="\1"><failure/></testcase>|p' "$work/console"
    [ $status = 0 ] || echo '<testcase classname="rdma" name="machine"><failure/></testcase>'
    echo '</testsuite>'
} >"$results/rdma.xml"
grep -q '^guest: failed' "$work/console" && status=1
exit $status
