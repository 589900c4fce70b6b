package modules

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"
)

var tree = fstest.MapFS{
	"modules.dep": file(
		"kernel/net/bridge/bridge.ko: kernel/net/802/stp.ko kernel/net/llc/llc.ko",
		"kernel/net/802/stp.ko: kernel/net/llc/llc.ko",
		"kernel/net/llc/llc.ko:",
		"kernel/fs/ext4/ext4.ko: kernel/fs/mbcache.ko",
		"kernel/fs/mbcache.ko:",
		"kernel/crypto/crc32c_generic.ko:",
		"kernel/arch/x86/crypto/crc32c-intel.ko.xz:",
		"kernel/a.ko:",
		"kernel/b.ko:",
	),
	"modules.alias": file(
		"# comment",
		"alias fs-ext4 ext4",
		"alias crypto-crc32c crc32c_generic",
		"alias crypto-crc32c crc32c_intel",
		"alias virtio:d00000001v* b",
		"alias nonsense",
	),
	"modules.softdep": file(
		"softdep ext4 pre: crypto-crc32c no-such-module",
		"softdep a pre: b post: llc",
		"softdep b pre: a", // a circle
		"softdep bridge ext4",
	),
	"modules.builtin": file("kernel/drivers/tty/built-in-thing.ko"),
}

func file(lines ...string) *fstest.MapFile {
	return &fstest.MapFile{Data: []byte(strings.Join(lines, "\n") + "\n")}
}

func TestOrder(t *testing.T) {
	x, err := readIndex(tree)
	if err != nil {
		t.Fatal(err)
	}
	for request, want := range map[string]string{
		"bridge":                "llc stp bridge",
		"llc":                   "llc",
		"fs-ext4":               "crc32c_generic crc32c_intel mbcache ext4",
		"crypto-crc32c":         "crc32c_generic crc32c_intel",
		"crc32c-intel":          "crc32c_intel",
		"virtio:d00000001v1af4": "a llc b",
		"a":                     "b a llc",
		"built_in-thing":        "",
	} {
		names, err := x.resolve(request)
		if err != nil {
			t.Errorf("%s: %v", request, err)
		}
		var got []string
		seen := map[string]bool{}
		for _, n := range names {
			for _, f := range x.order(nil, n, seen) {
				got = append(got, moduleName(f))
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %s", request, got, want)
		}
	}
	if _, err := x.resolve("net-pf-99"); !errors.Is(err, ErrUnknown) {
		t.Errorf("unknown alias: %v", err)
	}
}

func TestIndexIsIncomplete(t *testing.T) {
	for name := range tree {
		broken := fstest.MapFS{}
		for n, f := range tree {
			if n != name {
				broken[n] = f
			}
		}
		if _, err := readIndex(broken); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

func BenchmarkReadIndex(b *testing.B) {
	var dep strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&dep, "kernel/net/netfilter/module%d.ko: kernel/a.ko kernel/b.ko\n", i)
	}
	large := fstest.MapFS{}
	for n, f := range tree {
		large[n] = f
	}
	large["modules.dep"] = file(dep.String())
	for b.Loop() {
		if _, err := readIndex(large); err != nil {
			b.Fatal(err)
		}
	}
}
