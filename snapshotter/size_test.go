package snapshotter

import (
	"os"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testfs"
)

func TestDiskSize(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	plain, labelled := map[string]string{}, map[string]string{SizeLabel: "2g"}
	for _, tc := range []struct {
		label  string // "-" = none
		parent parentImage
		want   int64
		err    string
	}{
		{label: "-", want: 10 * gib},
		{label: "-", parent: parentImage{id: "1", size: 5 * gib, labels: plain}, want: 10 * gib},
		{label: "-", parent: parentImage{id: "1", size: 20 * gib, labels: plain}, want: 20 * gib},
		{label: "-", parent: parentImage{id: "1", size: 2 * gib, labels: labelled}, want: 2 * gib},
		{label: "1g", want: gib},
		{label: "512MiB", want: 512 * mib},
		{label: "64MiB", want: 64 * mib},
		{label: "100000001", want: 96 * mib},
		{label: "1TiB", want: 1 << 40},
		{label: "3GiB", parent: parentImage{id: "1", size: 2 * gib, labels: labelled}, want: 3 * gib},
		{label: "2GiB", parent: parentImage{id: "1", size: 2 * gib, labels: labelled}, want: 2 * gib},
		{label: "1GiB", parent: parentImage{id: "1", size: 2 * gib, labels: labelled}, err: "smaller than the image's disk of 2GiB"},
		{label: "", err: "is not a size"},
		{label: "huge", err: "is not a size"},
		{label: "-1g", err: "is not a size"},
		{label: "0", err: "between 64MiB and 1TiB"},
		{label: "63MiB", err: "between"},
		{label: "2TiB", err: "between"},
		{label: "99999999999999999999999p", err: "between"},
		{label: "9223372036854775807", err: "between"},
	} {
		s := &Snapshotter{cfg: config.Default()}
		labels := map[string]string{SizeLabel: tc.label}
		if tc.label == "-" {
			labels = nil
		}
		got, err := s.diskSize(labels, tc.parent)
		if tc.err != "" {
			if err == nil {
				t.Errorf("%q is taken as %d", tc.label, got)
				continue
			}
			wantErr(t, err, errdefs.IsInvalidArgument, tc.err, SizeLabel)
			continue
		}
		if err != nil || got != tc.want {
			t.Errorf("%q over %v: got %d, %v, want %d", tc.label, tc.parent, got, err, tc.want)
		}
	}
}

func TestSizesOfImages(t *testing.T) {
	f := open(t, testfs.XFS(t, xfsSize))
	size := func(m []mount.Mount) int64 {
		st, err := os.Stat(m[0].Source)
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	if got := size(f.prepare("small", "", "128MiB")); got != 128<<20 {
		t.Errorf("labelled: %d", got)
	}
	if err := f.Commit(f.ctx, "first", "small"); err != nil {
		t.Fatal(err)
	}
	f.layer("image", "first", 0)
	if got := size(f.prepare("same", "image")); got != 128<<20 {
		t.Errorf("grandchild of a labelled snapshot: %d", got)
	}
	larger := f.prepare("larger", "image", "1GiB")
	if got := size(larger); got != 1<<30 {
		t.Errorf("larger child: %d", got)
	}
	// The file system has yet to grow, which the host's mount doesn't mind.
	onHost(t, larger, func(string) {})
	if got := size(f.prepare("default", "")); got != int64(f.cfg.Store.DiskSize) {
		t.Errorf("without a label: %d", got)
	}
	_, err := f.Prepare(f.ctx, "smaller", "image", sizeOpt("64MiB"))
	wantErr(t, err, errdefs.IsInvalidArgument, `prepare snapshot "smaller"`, "can grow but not shrink")
	if _, err := f.View(f.ctx, "view", "image", sizeOpt("nonsense")); err != nil {
		t.Errorf("a view has no size of its own: %v", err)
	}
	if got := files(t, f.tmp); len(got) != 0 {
		t.Errorf("left %v", got)
	}
}
