package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
)

// TestOutput: the output of a program that says as much as it can, with ten snapshots in between, is whole and in order: 20 MB, or
// a sample of it.
func TestOutput(t *testing.T) {
	const saves = 10
	lines := int64(400_000) // of 10 bytes
	if os.Getenv("CUBE_TEST_LONG") != "" {
		lines = 2_000_000
	}
	last := fmt.Sprint(lines)
	st := store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "output", oci.WithProcessArgs("sh", "-c", "read x; seq -f %09.0f 1 "+last+"; read x")).run(ctx, "")
	shim := b.shim(ctx)
	type whole struct {
		sum string
		err error
	}
	read := make(chan whole, 1)
	_, err := io.WriteString(b.in, "go\n")
	must(t, err)
	progress := make(chan struct{}, saves)
	go func() {
		h := sha256.New()
		var err error
		for range saves {
			if _, err = io.CopyN(h, b.out, lines*10/saves); err != nil {
				break
			}
			progress <- struct{}{}
		}
		read <- whole{hex.EncodeToString(h.Sum(nil)), err}
	}()
	began := time.Now()
	for range saves {
		name, err := shim.Save(ctx, "", "")
		must(t, err)
		_, err = st.Delete(name)
		must(t, err)
		await(t, "the output", progress)
	}
	got := await(t, "the output's end", read)
	must(t, got.err)
	t.Logf("%d lines with %d snapshots: %v", lines, saves, time.Since(began).Round(time.Millisecond))
	seq, err := exec.Command("seq", "-f", "%09.0f", "1", last).Output()
	must(t, err)
	if want := sha256.Sum256(seq); got.sum != hex.EncodeToString(want[:]) {
		t.Errorf("the output's digest is %s, want %x", got.sum, want)
	}
	b.end(ctx)
}
