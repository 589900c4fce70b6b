package registry

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// window bounds how far back compressed data refers, in bytes: what it takes to read it.
const window = 1 << 20

// Fetch gives put all that i has of the artefact's files, each chunk once, from several goroutines: i is the artefact's own snapshot, or
// that without memory. put checks what it gets. The error is errdefs.ErrDataLoss where the registry gives something else than it says.
func (a *Artefact) Fetch(ctx context.Context, i *snapshot.Info, put snapshot.Put, tell Report) error {
	wanted := map[string]bool{}
	for _, f := range i.Files() {
		wanted[f.Name] = true
	}
	var some []part
	var layers []ocispec.Descriptor
	for n, p := range parts(&a.Machine.Snapshot) {
		if wanted[p.file] {
			some, layers = append(some, p), append(layers, a.layers[n])
		}
	}
	progress := newProgress(some, tell, "fetched")
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for n, p := range some {
		g.Go(func() error {
			if err := gctx.Err(); err != nil {
				return err
			}
			if err := a.part(gctx, layers[n], p, put); err != nil {
				return err
			}
			progress.add(p)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return fmt.Errorf("pull %s: %w", a.Name, cause)
		}
		return explain("pull", a.Name, err)
	}
	return nil
}

// Bytes are how many Fetch puts, none of them zero as a whole MiB.
func Bytes(i *snapshot.Info) (n int64) {
	for _, p := range parts(i) {
		n += p.bytes()
	}
	return n
}

// part fetches a part. Of what is compressed no more is made than the part has.
func (a *Artefact) part(ctx context.Context, d ocispec.Descriptor, p part, put snapshot.Put) error {
	r, err := a.fetch(ctx, d)
	if err != nil {
		return err
	}
	defer r.Close()
	raw := &arrival{from: &io.LimitedReader{R: r, N: d.Size + 1}, sum: digest.SHA256.Digester()}
	z, err := zstd.NewReader(raw, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window), zstd.WithDecoderMaxMemory(partChunks*memory.ChunkSize))
	if err != nil {
		return err
	}
	defer z.Close()
	buf := make([]byte, memory.ChunkSize)
	for _, n := range p.chunks {
		chunk := buf[:memory.ChunkLen(p.size, n)]
		if _, err := io.ReadFull(z, chunk); err != nil {
			return raw.failed(err)
		}
		if err := put(p.file, n, chunk); errdefs.IsDataLoss(err) {
			return fmt.Errorf("%w: MiB %d of %s", errNotWhole, n, p.file)
		} else if err != nil {
			return &local{err}
		}
	}
	if n, err := z.Read(buf[:1]); n != 0 {
		return damaged("a layer has more than its part of %s", p.file)
	} else if err != io.EOF {
		return raw.failed(err)
	}
	if _, err := io.Copy(io.Discard, raw); err != nil {
		return raw.failed(err)
	}
	if raw.from.N != 1 || raw.sum.Digest() != d.Digest {
		return errNotWhole
	}
	return nil
}

// arrival is what a registry sends.
type arrival struct {
	from *io.LimitedReader
	sum  digest.Digester
	err  error // of the sending
}

func (a *arrival) Read(b []byte) (int, error) {
	n, err := a.from.Read(b)
	_, _ = a.sum.Hash().Write(b[:n]) // never fails (hash.Hash)
	if err != nil && err != io.EOF { // which one of a connection may wrap
		a.err = err
	}
	return n, err
}

// failed tells an error of the sending from one of what was sent.
func (a *arrival) failed(err error) error {
	if a.err != nil && !errdefs.IsFailedPrecondition(a.err) { // which is that more comes than there is
		return a.err
	}
	return fmt.Errorf("%w: %w", errNotWhole, err)
}

// progress tells of each tenth of what there is to be done.
type progress struct {
	tell Report
	done string
	all  int64

	mu   sync.Mutex
	some int64
}

func newProgress(all []part, tell Report, done string) *progress {
	p := &progress{tell: tell, done: done}
	for _, one := range all {
		p.all += one.bytes()
	}
	return p
}

func (p *progress) add(one part) {
	p.mu.Lock()
	before := p.some * 10 / p.all
	p.some += one.bytes()
	tenth := p.some * 10 / p.all
	p.mu.Unlock()
	if tenth > before {
		p.tell(fmt.Sprintf("%s %d %% of %s", p.done, tenth*10, units.BytesSize(float64(p.all))))
	}
}
