package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"github.com/cubesandbox/cube/vmm/memory"
)

// Read reads a chunk of a file of the snapshot into buf, and checks it. It is called from several goroutines.
type Read func(file string, n int64, buf []byte) ([]byte, error)

// Push has a registry have an artefact by a name, with its tag, and returns the name with the artefact's digest. It sends what the
// repository hasn't, a few parts at a time, and the manifest last: an artefact is there as a whole or not at all, and who begins again
// goes on where it was.
func Push(ctx context.Context, name string, hosts docker.RegistryHosts, c Config, read Read, tell Report) (at string, err error) {
	c.Format = configFormat
	if err := c.check(); err != nil {
		return "", err
	}
	ctx = remotes.WithMediaTypeKeyPrefix(remotes.WithMediaTypeKeyPrefix(ctx, configType, "config"), partType, "part")
	pusher, err := docker.NewResolver(docker.ResolverOptions{Hosts: hosts}).Pusher(ctx, name)
	if err != nil {
		return "", explain("push", name, err)
	}
	p := &push{pusher: pusher, read: read}
	all := parts(&c.Machine.Snapshot)
	p.progress = newProgress(all, tell, "sent")
	m := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, ArtifactType: ArtifactType,
		Layers: make([]ocispec.Descriptor, len(all)), Annotations: map[string]string{ocispec.AnnotationCreated: c.Created.UTC().Format("2006-01-02T15:04:05Z")},
	}
	if m.Config, err = p.json(ctx, configType, c, maxConfig); err != nil {
		return "", explain("push", name, err)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for i, one := range all {
		g.Go(func() (err error) {
			if err := gctx.Err(); err != nil {
				return err
			}
			m.Layers[i], err = p.part(gctx, one)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return "", fmt.Errorf("push %s: %w", name, cause)
		}
		return "", explain("push", name, err)
	}
	d, err := p.json(ctx, ocispec.MediaTypeImageManifest, m, maxManifest)
	if err != nil {
		return "", explain("push", name, err)
	}
	tell(fmt.Sprintf("%s in %d parts, %d of which the registry had", units.BytesSize(float64(p.sent)), len(all), p.had))
	return pinned(name, d.Digest)
}

type push struct {
	pusher   remotes.Pusher
	read     Read
	progress *progress

	// sending has parts that are the same be sent once: the library takes two such uploads for one.
	sending singleflight.Group

	mu   sync.Mutex
	sent int64 // bytes of parts
	had  int   // parts that were there
}

// part sends a part, which is compressed the same whenever and wherever that is done, so that what doesn't change is sent once.
func (p *push) part(ctx context.Context, of part) (ocispec.Descriptor, error) {
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithWindowSize(window))
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	buf := make([]byte, memory.ChunkSize)
	for _, n := range of.chunks {
		chunk, err := p.read(of.file, n, buf)
		if err != nil {
			return ocispec.Descriptor{}, &local{err}
		}
		if _, err := z.Write(chunk); err != nil {
			return ocispec.Descriptor{}, err
		}
	}
	if err := z.Close(); err != nil {
		return ocispec.Descriptor{}, err
	}
	d, had, err := p.send(ctx, partType, b.Bytes())
	if err != nil {
		return d, err
	}
	p.mu.Lock()
	if had {
		p.had++
	} else {
		p.sent += d.Size
	}
	p.mu.Unlock()
	p.progress.add(of)
	return d, nil
}

func (p *push) json(ctx context.Context, mediaType string, v any, most int) (ocispec.Descriptor, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	if len(b) > most {
		return ocispec.Descriptor{}, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("the template is too large for a registry: its description has %d bytes, at most %d can be", len(b), most))
	}
	d, _, err := p.send(ctx, mediaType, b)
	return d, err
}

// send sends a blob unless it is there.
func (p *push) send(ctx context.Context, mediaType string, b []byte) (d ocispec.Descriptor, had bool, err error) {
	d = ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
	there, err, _ := p.sending.Do(d.Digest.String(), func() (any, error) {
		w, err := p.pusher.Push(ctx, d)
		if err == nil {
			err = errors.Join(content.Copy(ctx, w, bytes.NewReader(b), d.Size, d.Digest), w.Close())
			if !errdefs.IsAlreadyExists(err) { // which is as good, if somebody else has sent it meanwhile
				return false, err
			}
		}
		if errdefs.IsAlreadyExists(err) {
			return true, nil
		}
		return false, err
	})
	return d, err == nil && there.(bool), err
}
