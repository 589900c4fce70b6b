package templates

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// odd is an image with what images seldom have.
const odd = "cube.local/odd:1"

// raw is the capability CAP_NET_RAW as a file has it: vfs_cap_data of linux/capability.h, revision 2, effective.
var raw = string([]byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})

// oddLayer has files of owners that the image doesn't know, with modes and attributes that are easily lost, devices, and what removes
// files of the layers below.
func oddLayer(t *testing.T) (file string) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []*tar.Header{
		{Name: "odd/", Typeflag: tar.TypeDir, Mode: 0o3775, Uid: 70001, Gid: 70002},
		{Name: "odd/suid", Typeflag: tar.TypeReg, Mode: 0o6755, Uid: 12345, Gid: 42},
		{Name: "odd/far", Typeflag: tar.TypeReg, Mode: 0o604, Uid: 4294967000, Gid: 3000000000, PAXRecords: map[string]string{"SCHILY.xattr.user.e2b.kept": "yes"}},
		{Name: "odd/able", Typeflag: tar.TypeReg, Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": raw}},
		{Name: "odd/link", Typeflag: tar.TypeSymlink, Linkname: "far", Mode: 0o777, Uid: 7, Gid: 8},
		{Name: "odd/hard", Typeflag: tar.TypeLink, Linkname: "odd/far", Mode: 0o604, Uid: 4294967000, Gid: 3000000000},
		{Name: "odd/null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3},
		{Name: "odd/disk", Typeflag: tar.TypeBlock, Mode: 0o660, Gid: 6, Devmajor: 7, Devminor: 99},
		{Name: "odd/fifo", Typeflag: tar.TypeFifo, Mode: 0o620},
		{Name: "etc/.wh.debian_version", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "etc/apt/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "etc/apt/.wh..wh..opq", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "etc/apt/only", Typeflag: tar.TypeReg, Mode: 0o644},
	} {
		h.ModTime, h.Format = time.Unix(1_500_000_000, 0), tar.FormatPAX
		must(t, w.WriteHeader(h))
	}
	must(t, w.Close())
	file = filepath.Join(t.TempDir(), "odd-layer.tar")
	must(t, os.WriteFile(file, b.Bytes(), 0o600))
	return file
}

// attributes prints extended attributes of files, in hexadecimal digits: Debian's perl has no call for that, x86-64's getxattr is 191.
const attributes = `perl -e 'for (["far", "user.e2b.kept"], ["hard", "user.e2b.kept"], ["able", "security.capability"]) {
	my $v = "\0" x 64; my $n = syscall(191, "/odd/$_->[0]", $_->[1], $v, 64); print unpack("H*", substr($v, 0, $n < 0 ? 0 : $n)), "\n" }'`

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
