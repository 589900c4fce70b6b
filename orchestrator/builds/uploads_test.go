package builds

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// tarOf is a tar with a file of random bytes, gzipped or not.
func tarOf(t *testing.T, size int, zip bool) []byte {
	t.Helper()
	var b bytes.Buffer
	var out io.Writer = &b
	z := gzip.NewWriter(&b)
	if zip {
		out = z
	}
	content := make([]byte, size)
	_, _ = rand.Read(content)
	w := tar.NewWriter(out)
	err := w.WriteHeader(&tar.Header{Name: "f", Mode: 0o644, Size: int64(size)})
	_, werr := w.Write(content)
	if err = errors.Join(err, werr, w.Close()); zip {
		err = errors.Join(err, z.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sumOf(n int) string { return fmt.Sprintf("%064x", n) }

// there are the sums of those of a team's first files that are there.
func there(u *Uploads, team string) (s string) {
	for n := range 10 {
		if u.Has(team, sumOf(n)) {
			s += fmt.Sprint(n)
		}
	}
	return s
}

// files are those below a directory.
func files(t *testing.T, dir string) (n int) {
	t.Helper()
	err := filepath.WalkDir(dir, func(_ string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			n++
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestUploads: files are kept by team and sum over restarts, in bounds, those that are needed longest.
func TestUploads(t *testing.T) {
	dir, ctx := t.TempDir(), t.Context()
	open := func() *Uploads {
		t.Helper()
		u, err := OpenUploads(dir, 100<<10, 250<<10)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	u := open()
	put := func(team string, n int, b []byte) error {
		must(t, u.expect(team))
		return u.Put(ctx, team, sumOf(n), bytes.NewReader(b), int64(len(b)))
	}
	zipped := tarOf(t, 70<<10, true)
	for n := range 3 {
		must(t, put("blue", n, zipped))
	}
	if got := there(u, "blue"); got != "012" {
		t.Errorf("there are %s", got)
	}
	if u.Has("green", sumOf(0)) {
		t.Error("another team has it")
	}
	read := func(n int) []byte {
		t.Helper()
		f, err := u.Open(ctx, "blue", sumOf(n))
		must(t, err)
		defer f.Close()
		b, err := io.ReadAll(f)
		must(t, err)
		return b
	}
	if !bytes.Equal(read(0), zipped) { // and 1 is what wasn't used for longest
		t.Error("it has other bytes")
	}
	must(t, put("green", 5, zipped))
	if got := there(u, "blue") + there(u, "green"); got != "025" {
		t.Errorf("there are %s", got)
	}
	if n := files(t, dir); n != 3 {
		t.Errorf("%d files", n)
	}
	// What builds need stays.
	release, missing := u.pin("blue", []string{sumOf(0), sumOf(2)})
	if missing != "" {
		t.Fatal(missing)
	}
	if _, missing := u.pin("blue", []string{sumOf(0), sumOf(1)}); missing != sumOf(1) {
		t.Errorf("%s is missing", missing)
	}
	must(t, put("blue", 0, zipped)) // in the place of what is needed
	must(t, put("green", 6, zipped))
	if got := there(u, "blue") + there(u, "green"); got != "026" {
		t.Errorf("there are %s", got)
	}
	again, _ := u.pin("green", []string{sumOf(6)})
	if err := put("green", 7, zipped); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "templates.uploads") {
		t.Errorf("without room: %v", err)
	}
	again()
	release()
	release()
	// The next service finds them, and not what wasn't whole.
	must(t, os.WriteFile(filepath.Join(dir, "blue", "."+sumOf(8)+".1"), zipped, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "stray"), zipped, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "blue", sumOf(2)+".later"), zipped[:10], 0o600))
	must(t, os.Chtimes(filepath.Join(dir, "blue", sumOf(2)+".later"), time.Now().Add(time.Hour), time.Now().Add(time.Hour)))
	u = open()
	if got := there(u, "blue") + there(u, "green"); got != "026" || files(t, dir) != 3 || len(read(2)) != 10 {
		t.Errorf("there are %s, in %d files", got, files(t, dir))
	}
	// A tar that isn't gzipped is.
	plain := tarOf(t, 20<<10, false)
	must(t, put("blue", 9, plain))
	z, err := gzip.NewReader(bytes.NewReader(read(9)))
	must(t, err)
	if b, err := io.ReadAll(z); err != nil || !bytes.Equal(b, plain) {
		t.Errorf("%d bytes of it, %v", len(b), err)
	}
	if f, err := u.Open(ctx, "blue", sumOf(7)); !errdefs.IsNotFound(err) {
		t.Errorf("%v, %v", f, err)
	}
}

// slow is a body that does something before its end.
type slow struct {
	io.Reader
	do func()
}

func (s *slow) Read(b []byte) (int, error) {
	n, err := s.Reader.Read(b)
	if err == io.EOF && s.do != nil {
		s.do()
		s.do = nil
	}
	return n, err
}

// TestLateUpload: what comes whole only when all of its team is being removed, or after that, isn't kept.
func TestLateUpload(t *testing.T) {
	dir := t.TempDir()
	u, err := OpenUploads(dir, 100<<10, 250<<10)
	must(t, err)
	must(t, u.expect("blue"))
	whole := tarOf(t, 1000, true)
	body := &slow{bytes.NewReader(whole), func() { must(t, u.removeAll(t.Context(), "blue")) }}
	for range 2 {
		if err := u.Put(t.Context(), "blue", sumOf(1), body, -1); !errdefs.IsNotFound(err) || strings.Contains(err.Error(), dir) {
			t.Errorf("%v", err)
		}
		body = &slow{bytes.NewReader(whole), nil}
	}
	if left, err := u.list(t.Context(), "blue"); err != nil || len(left) > 0 || u.Has("blue", sumOf(1)) || u.used != 0 {
		t.Errorf("%q, %v, %d bytes", left, err, u.used)
	}
	must(t, u.expect("blue"))
	must(t, u.Put(t.Context(), "blue", sumOf(1), bytes.NewReader(whole), -1))
}

// TestPutRefuses: what isn't a whole tar of bounded size leaves nothing.
func TestPutRefuses(t *testing.T) {
	dir := t.TempDir()
	u, err := OpenUploads(dir, 64<<10, 1<<20)
	must(t, err)
	must(t, u.expect("blue"))
	whole := tarOf(t, 1000, true)
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	w := tar.NewWriter(z)
	_ = w.WriteHeader(&tar.Header{Name: "zeros", Size: 2 << 20})
	_, _ = w.Write(make([]byte, 2<<20))
	_, _ = w.Close(), z.Close()
	var empty bytes.Buffer
	e := gzip.NewWriter(&empty)
	_ = e.Close()
	cut, stop := context.WithCancel(t.Context())
	stop()
	for name, c := range map[string]struct {
		ctx  context.Context
		body io.Reader
		size int64
		is   func(error) bool
		says string
	}{
		"nothing":         {t.Context(), bytes.NewReader(nil), 0, errdefs.IsInvalidArgument, "nothing in it"},
		"an empty gzip":   {t.Context(), &empty, -1, errdefs.IsInvalidArgument, "nothing in it"},
		"text":            {t.Context(), strings.NewReader(strings.Repeat("hello ", 200)), 1200, errdefs.IsInvalidArgument, "isn't a tar"},
		"half":            {t.Context(), bytes.NewReader(whole[:600]), -1, errdefs.IsInvalidArgument, "isn't a tar"},
		"half, plain":     {t.Context(), bytes.NewReader(tarOf(t, 1000, false)[:700]), -1, errdefs.IsInvalidArgument, "isn't a tar"},
		"more":            {t.Context(), io.MultiReader(bytes.NewReader(whole), strings.NewReader("more")), -1, errdefs.IsInvalidArgument, "isn't a tar"},
		"large":           {t.Context(), bytes.NewReader(tarOf(t, 70<<10, true)), -1, errdefs.IsOutOfRange, "64KiB"},
		"said to be":      {t.Context(), bytes.NewReader(whole), 65 << 10, errdefs.IsOutOfRange, "64KiB"},
		"a bomb":          {t.Context(), &bomb, -1, errdefs.IsInvalidArgument, "655360 bytes without its compression"},
		"a client's end":  {t.Context(), io.MultiReader(bytes.NewReader(whole[:500]), failing{}), -1, errdefs.IsInvalidArgument, "didn't come whole: connection reset"},
		"a request's end": {cut, bytes.NewReader(whole), -1, func(err error) bool { return errors.Is(err, context.Canceled) }, "canceled"},
	} {
		err := u.Put(c.ctx, "blue", sumOf(1), c.body, c.size)
		if !c.is(err) || !strings.Contains(fmt.Sprint(err), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if n := files(t, dir); n > 0 || u.used != 0 || u.Has("blue", sumOf(1)) {
			t.Errorf("%s: %d files are left, %d bytes counted", name, n, u.used)
		}
	}
}

// failing is a client that is gone.
type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("connection reset") }

// TestLink: a link is good for its file and its time, and for as long as there is its template.
func TestLink(t *testing.T) {
	s, ctx := newStand(t), t.Context()
	c, err := s.Create(ctx, Request{Team: "blue", Name: "app"})
	s.must(err)
	upload := func(until time.Time, sum string) error {
		l := link{template: c.Template, team: "blue", sum: sumOf(1), until: until.Unix()}
		u, err := url.Parse(l.path(s.engine))
		s.must(err)
		b := tarOf(t, 10, true)
		return s.Upload(ctx, c.Template, sum, u.Query(), bytes.NewReader(b), int64(len(b)))
	}
	_, _, err = s.Link(ctx, "blue", db.Ref{Name: "app"}, sumOf(1))
	s.must(err)
	soon := time.Now().Add(time.Minute)
	s.must(upload(soon, sumOf(1)))
	if err := upload(soon, sumOf(2)); !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "isn't one that this API has given out") {
		t.Errorf("for another file: %v", err)
	}
	if err := upload(time.Now().Add(-2*time.Second), sumOf(1)); !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "was good until") {
		t.Errorf("too late: %v", err)
	}
	s.must(s.Delete(ctx, "blue", "app"))
	if err := upload(soon, sumOf(1)); !errdefs.IsNotFound(err) {
		t.Errorf("without a template: %v", err)
	}
	// What a team has goes with it.
	jobs, uploads := s.Assets()
	going := s.begin("blue", "going", Plan{Image: "a"})
	if names, err := jobs.List(ctx, "blue"); err != nil || len(names) != 1 || names[0] != going.Build {
		t.Errorf("%v, %v", names, err)
	}
	if names, err := uploads.List(ctx, "blue"); err != nil || len(names) != 1 {
		t.Errorf("%v, %v", names, err)
	}
	s.must(jobs.Remove(ctx, "blue"))
	s.must(uploads.Remove(ctx, "blue"))
	left, err := jobs.List(ctx, "blue")
	s.must(err)
	more, err := uploads.List(ctx, "blue")
	if err != nil || len(left)+len(more) > 0 || s.uploads.Has("blue", sumOf(1)) || s.uploads.used != 0 {
		t.Errorf("%v and %v are left, %v", left, more, err)
	}
}
