package registry

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// forge is an artefact as somebody may make it.
type forge struct {
	*stand
	ocispec.Manifest
	config Config
}

// get reads what the registry has.
func (s *stand) get(path string) []byte {
	s.Helper()
	r, err := http.Get(s.url + "/v2/app/" + path)
	s.must(err)
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	s.must(err)
	if r.StatusCode != http.StatusOK {
		s.Fatalf("%s: %s", path, r.Status)
	}
	return b
}

// put has the registry have something.
func (s *stand) put(path, mediaType string, b []byte) {
	s.Helper()
	method := http.MethodPut
	if strings.HasPrefix(path, "blobs") {
		method = http.MethodPost
	}
	r, err := http.NewRequestWithContext(s.Context(), method, s.url+"/v2/app/"+path, bytes.NewReader(b))
	s.must(err)
	r.Header.Set("Content-Type", mediaType)
	resp, err := http.DefaultClient.Do(r)
	s.must(err)
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		s.Fatalf("%s: %s", path, resp.Status)
	}
}

// add adds a blob.
func (s *stand) add(mediaType string, b []byte) ocispec.Descriptor {
	s.Helper()
	d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
	s.put("blobs/uploads/?digest="+d.Digest.String(), "application/octet-stream", b)
	return d
}

// layer has a layer be of other bytes, or with z of those that are compressed then.
func (f *forge) layer(n int, b []byte, z bool) {
	f.Helper()
	if z {
		var to bytes.Buffer
		e, err := zstd.NewWriter(&to, zstd.WithWindowSize(window))
		f.must(err)
		_, err = e.Write(b)
		f.must(err)
		f.must(e.Close())
		b = to.Bytes()
	}
	f.Layers[n] = f.add(partType, b)
}

// raw is what a layer has.
func (f *forge) raw(n int) []byte {
	f.Helper()
	d, err := zstd.NewReader(bytes.NewReader(f.get("blobs/" + f.Layers[n].Digest.String())))
	f.must(err)
	defer d.Close()
	b, err := io.ReadAll(d)
	f.must(err)
	return b
}

// Whatever a registry has, nothing of it is taken that isn't as it says, and no more is made of it than that.
func TestForged(t *testing.T) {
	const (
		state = 0 // layers
		mem   = 1
	)
	s := newStand(t)
	_, err := s.push(t.Context(), "app:good")
	s.must(err)
	for name, c := range map[string]struct {
		change func(*forge)
		is     func(error) bool
		says   string
	}{
		"another content":         {func(f *forge) { b := f.raw(mem); b[8192] ^= 1; f.layer(mem, b, true) }, errdefs.IsDataLoss, "MiB 0 of memory"},
		"chunks in another order": {func(f *forge) { b := f.raw(mem); f.layer(mem, append(b[1<<20:], b[:1<<20]...), true) }, errdefs.IsDataLoss, "MiB 0 of memory"},
		"another part":            {func(f *forge) { f.Layers[mem], f.Layers[mem+1] = f.Layers[mem+1], f.Layers[mem] }, errdefs.IsDataLoss, ""},
		"cut short": {func(f *forge) {
			b := f.get("blobs/" + f.Layers[mem].Digest.String())
			f.layer(mem, b[:len(b)/2], false)
		}, errdefs.IsDataLoss, "digest stands for"},
		"a chunk too few": {func(f *forge) { f.layer(mem, f.raw(mem)[1<<20:], true) }, errdefs.IsDataLoss, ""},
		"a bomb":          {func(f *forge) { f.layer(mem, append(f.raw(mem), make([]byte, 64<<20)...), true) }, errdefs.IsDataLoss, "more than its part"},
		"more behind it": {func(f *forge) {
			b := f.get("blobs/" + f.Layers[state].Digest.String())
			f.layer(state, append(b, "and more"...), false)
		}, errdefs.IsDataLoss, ""},
		"no zstd":                      {func(f *forge) { f.layer(state, []byte("no zstd at all"), false) }, errdefs.IsDataLoss, ""},
		"a far window":                 {func(f *forge) { f.layer(mem, farWindow(f), false) }, errdefs.IsDataLoss, ""},
		"a layer too few":              {func(f *forge) { f.Layers = f.Layers[1:] }, errdefs.IsDataLoss, "layers"},
		"a layer too many":             {func(f *forge) { f.Layers = append(f.Layers, f.Layers[0]) }, errdefs.IsDataLoss, "layers"},
		"a layer that is too large":    {func(f *forge) { f.Layers[state].Size = 1 << 30 }, errdefs.IsDataLoss, "layer 0"},
		"a layer of a negative size":   {func(f *forge) { f.Layers[state].Size = -1 }, errdefs.IsDataLoss, "layer 0"},
		"a layer of another kind":      {func(f *forge) { f.Layers[state].MediaType = ocispec.MediaTypeImageLayerZstd }, errdefs.IsDataLoss, "layer 0"},
		"a layer of another size":      {func(f *forge) { f.Layers[state].Size++ }, func(err error) bool { return errdefs.IsDataLoss(err) || errdefs.IsUnavailable(err) }, ""},
		"a digest of another kind":     {func(f *forge) { f.Layers[state].Digest = "md5:00" }, errdefs.IsDataLoss, "layer 0"},
		"an image":                     {func(f *forge) { f.ArtifactType, f.Config.MediaType = "", ocispec.MediaTypeImageConfig }, errdefs.IsFailedPrecondition, "no template"},
		"another artefact":             {func(f *forge) { f.ArtifactType = "application/vnd.other" }, errdefs.IsFailedPrecondition, "application/vnd.other"},
		"a large config":               {func(f *forge) { f.Manifest.Config.Size = maxConfig + 1 }, errdefs.IsDataLoss, "description"},
		"another format":               {func(f *forge) { f.config.Format = 2 }, errdefs.IsFailedPrecondition, "format 2"},
		"another format of a snapshot": {func(f *forge) { f.config.Machine.Snapshot.Format = 9 }, errdefs.IsFailedPrecondition, "format 9"},
		"a name":                       {func(f *forge) { f.config.Machine.Snapshot.ID = "own" }, errdefs.IsDataLoss, "a name"},
		"a note":                       {func(f *forge) { f.config.Machine.Snapshot.Note = json.RawMessage(`{"format":1}`) }, errdefs.IsDataLoss, "a note"},
		"a container":                  {func(f *forge) { f.config.Template.Container = json.RawMessage(`{"spec":{"mounts":[{"source":"/"}]}}`) }, errdefs.IsDataLoss, "a container"},
		"an image to begin with":       {func(f *forge) { f.config.Template.Image = "debian" }, errdefs.IsDataLoss, "a container"},
		"not at rest":                  {func(f *forge) { f.config.Machine.Snapshot.Frozen = false }, errdefs.IsDataLoss, "at rest"},
		"two disks": {func(f *forge) {
			f.disk(snapshot.Disk{SavedDisk: vmm.SavedDisk{Serial: "d2", LUN: 2}, File: snapshot.File{Size: 1 << 20, Digests: memory.Digests{}}})
		}, errdefs.IsDataLoss, "other disks"},
		"a huge disk":                  {func(f *forge) { f.config.Machine.Snapshot.Disks[0].File.Size = 1 << 60 }, errdefs.IsDataLoss, ""},
		"a memory of another size":     {func(f *forge) { f.config.Machine.Snapshot.Shape.MemoryMiB *= 2 }, errdefs.IsDataLoss, ""},
		"a path for QEMU":              {func(f *forge) { f.config.Machine.Snapshot.Platform.QEMU = "../../tmp/q" }, errdefs.IsDataLoss, "artefacts"},
		"more CPUs than it says":       {func(f *forge) { f.config.Machine.Snapshot.Shape.VCPUs = 32 }, errdefs.IsDataLoss, "CPUs"},
		"less memory than it says":     {func(f *forge) { f.config.Template.MemoryMB = 256 }, errdefs.IsDataLoss, "MiB"},
		"a guest's id that is none":    {func(f *forge) { f.config.Machine.Guest = "../x" }, errdefs.IsDataLoss, "called"},
		"a terminal":                   {func(f *forge) { f.config.Machine.Process.Terminal = true }, errdefs.IsDataLoss, "first process"},
		"a variable that is none":      {func(f *forge) { f.config.Template.Env = []string{"A"} }, errdefs.IsDataLoss, "variable"},
		"many variables":               {func(f *forge) { f.config.Template.Env = []string{"A=" + strings.Repeat("x", maxEnv)} }, errdefs.IsDataLoss, "variables"},
		"a version that is none":       {func(f *forge) { f.config.Template.EnvdVersion = "1\n" }, errdefs.IsDataLoss, "version"},
		"a builder with control codes": {func(f *forge) { f.config.Template.Builder = "\x1b[2J" }, errdefs.IsDataLoss, "name"},
		"a chunk of zeros":             {func(f *forge) { f.zeros() }, errdefs.IsDataLoss, "MiB 2 of memory"},
	} {
		t.Run(name, func(t *testing.T) {
			defer s.within(t)()
			f := &forge{stand: s}
			s.must(json.Unmarshal(s.get("manifests/good"), &f.Manifest))
			s.must(json.Unmarshal(s.get("blobs/"+f.Config.Digest.String()), &f.config))
			was := encode(t, f.config)
			c.change(f)
			if now := encode(t, f.config); now != was {
				f.Config = s.add(configType, []byte(now))
			}
			s.put("manifests/bad", ocispec.MediaTypeImageManifest, []byte(encode(t, f.Manifest)))
			_, err := s.pull(t.Context(), s.host+"/app:bad", "bad", true)
			if !c.is(err) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
			s.nothing()
		})
	}
}

func (f *forge) disk(d snapshot.Disk) {
	f.config.Machine.Snapshot.Disks = append(f.config.Machine.Snapshot.Disks, d)
}

// zeros has a chunk of zeros have a digest, which is found damaged wherever it is read.
func (f *forge) zeros() {
	b := f.raw(1)
	f.config.Machine.Snapshot.Memory.Digests[2] = sha256.Sum256(make([]byte, 1<<20))
	f.layer(1, append(b[:2<<20:2<<20], append(make([]byte, 1<<20), b[2<<20:]...)...), true)
}

// farWindow is the memory's first part, compressed so that it takes much to read it.
func farWindow(f *forge) []byte {
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b, zstd.WithWindowSize(16*window))
	f.must(err)
	_, err = z.Write(f.raw(1))
	f.must(err)
	f.must(z.Flush()) // without the size of what comes
	f.must(z.Close())
	return b.Bytes()
}

// An index, and what can't be read at all.
func TestForeign(t *testing.T) {
	s := newStand(t)
	s.put("manifests/index", ocispec.MediaTypeImageIndex, []byte(`{"schemaVersion":2,"mediaType":"`+ocispec.MediaTypeImageIndex+`","manifests":[]}`))
	if _, err := Open(t.Context(), s.host+"/app:index", s.hosts); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "no template") {
		t.Errorf("an index: %v", err)
	}
	config := s.add(configType, []byte(`{"format":1,"more":true}`))
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, ArtifactType: ArtifactType, Config: config}
	m.SchemaVersion = 2
	s.put("manifests/more", ocispec.MediaTypeImageManifest, []byte(encode(t, m)))
	if _, err := Open(t.Context(), s.host+"/app:more", s.hosts); !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), "more") {
		t.Errorf("what isn't known: %v", err)
	}
	if _, err := Open(t.Context(), s.host+"/none:1", s.hosts); !errdefs.IsNotFound(err) {
		t.Errorf("none: %v", err)
	}
}

// What is fetched is what the digest stands for, also where it has something in it that isn't read.
func TestAlike(t *testing.T) {
	s := newStand(t)
	_, err := s.push(t.Context(), "app:good")
	s.must(err)
	f := &forge{stand: s}
	s.must(json.Unmarshal(s.get("manifests/good"), &f.Manifest))
	skipped := append(s.get("blobs/"+f.Layers[0].Digest.String()), 0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 'n', 'o', 'n', 'e')
	f.layer(0, skipped, false)
	s.put("manifests/skipped", ocispec.MediaTypeImageManifest, []byte(encode(t, f.Manifest)))
	if _, err := s.pull(t.Context(), s.host+"/app:skipped", "skipped", true); err != nil {
		t.Fatal(err)
	}
	_, err = s.store.Delete("skipped")
	s.must(err)
	s.take(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, f.Layers[0].Digest.String()) {
			return false
		}
		_, _ = w.Write(append(skipped[:len(skipped)-1:len(skipped)-1], 'E'))
		return true
	})
	if _, err := s.pull(t.Context(), s.host+"/app:skipped", "bad", true); !errdefs.IsDataLoss(err) {
		t.Errorf("%v", err)
	}
	s.nothing()
}

// A registry that gives something else than it was asked for, breaks off, or lets nobody in.
func TestLies(t *testing.T) {
	s := newStand(t)
	at, err := s.push(t.Context(), "app:good")
	s.must(err)
	_, sum, _ := strings.Cut(at, "@")
	a, err := Open(t.Context(), at, s.hosts)
	s.must(err)
	layer := a.layers[1].Digest.String()
	for name, c := range map[string]struct {
		at     string
		answer func(w http.ResponseWriter, b []byte)
		is     func(error) bool
	}{
		"another manifest": {"manifests/" + sum, func(w http.ResponseWriter, b []byte) {
			_, _ = w.Write(bytes.Replace(b, []byte("2026"), []byte("2027"), 1))
		}, errdefs.IsDataLoss},
		"a longer layer": {"blobs/" + layer, func(w http.ResponseWriter, b []byte) { _, _ = w.Write(append(b, make([]byte, 1<<20)...)) }, errdefs.IsDataLoss},
		"another layer":  {"blobs/" + layer, func(w http.ResponseWriter, b []byte) { b[len(b)-1] ^= 1; _, _ = w.Write(b) }, errdefs.IsDataLoss},
		"nobody":         {"blobs/" + layer, func(w http.ResponseWriter, _ []byte) { w.WriteHeader(http.StatusForbidden) }, func(err error) bool { return errdefs.IsPermissionDenied(err) || errdefs.IsUnavailable(err) }},
		"broken": {"blobs/" + layer, func(w http.ResponseWriter, b []byte) {
			_, _ = w.Write(b[:len(b)/2])
			panic(http.ErrAbortHandler)
		}, errdefs.IsUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			defer s.within(t)()
			b := s.get(c.at)
			s.take(func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, c.at) {
					return false
				}
				w.Header().Set("Content-Type", ocispec.MediaTypeImageManifest)
				c.answer(w, bytes.Clone(b))
				return true
			})
			defer s.take(nil)
			_, err := s.pull(t.Context(), at, "bad", true)
			if !c.is(err) {
				t.Errorf("%v", err)
			}
			s.nothing()
		})
	}
}
