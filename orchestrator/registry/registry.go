// Package registry carries templates to registries and back: OCI artefacts whose config says what the template is, and whose layers
// are the files of its machine's snapshot, in parts of a bounded size, without what is zero. What comes from a registry is somebody
// else's: it is read with limits, and nothing of it is given to anybody before it is what the artefact's digest stands for. Which
// registries may be asked, and where a snapshot is put, is of others.
package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// ArtifactType is what an artefact of a template says it is.
	ArtifactType = "application/vnd.cube.template.v1"

	configType = "application/vnd.cube.template.config.v1+json"
	partType   = "application/vnd.cube.template.part.v1+zstd"
)

// Bounds of what is read, in bytes. A registry seldom takes a larger manifest; a config has 54 bytes for each MiB that isn't zero.
const (
	maxManifest = 4 << 20
	maxConfig   = 32 << 20
)

// parallel is how many parts are on the way at once.
const parallel = 2

// Report tells how far it has come.
type Report func(message string)

// Name gives a name of an artefact its registry and tag, as images have it: it is REGISTRY/REPOSITORY[:TAG|@DIGEST].
func Name(s string) (name string, err error) {
	named, err := reference.ParseDockerRef(s)
	if err != nil {
		return "", errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%.200q is nothing in a registry, which is REGISTRY/REPOSITORY[:TAG]: %v", s, err))
	}
	return named.String(), nil
}

// Host is the registry in a name.
func Host(name string) string {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return ""
	}
	return reference.Domain(named)
}

// pinned is the name of the same repository's with that digest.
func pinned(name string, d digest.Digest) (string, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return "", err
	}
	at, err := reference.WithDigest(reference.TrimNamed(named), d)
	if err != nil {
		return "", err
	}
	return at.String(), nil
}

// Artefact is one that is there, of which nothing but what it says of itself has been read.
type Artefact struct {
	// Name has its digest.
	Name   string
	Digest digest.Digest
	Config

	fetcher remotes.Fetcher
	layers  []ocispec.Descriptor
}

// Open finds an artefact and reads what it says of itself. What isn't a template's is errdefs.ErrDataLoss or ErrFailedPrecondition.
func Open(ctx context.Context, name string, hosts docker.RegistryHosts) (*Artefact, error) {
	resolver := docker.NewResolver(docker.ResolverOptions{Hosts: hosts})
	_, found, err := resolver.Resolve(ctx, name)
	if err != nil {
		return nil, explain("pull", name, err)
	}
	a := &Artefact{Digest: found.Digest}
	if a.Name, err = pinned(name, found.Digest); err != nil {
		return nil, err
	}
	if found.MediaType != ocispec.MediaTypeImageManifest {
		return nil, noTemplate(name, found.MediaType)
	}
	if a.fetcher, err = resolver.Fetcher(ctx, a.Name); err != nil {
		return nil, explain("pull", name, err)
	}
	b, err := a.blob(ctx, found, maxManifest)
	if err != nil {
		return nil, explain("pull", name, err)
	}
	config, err := a.manifest(name, b)
	if err != nil {
		return nil, err
	}
	if b, err = a.blob(ctx, config, maxConfig); err != nil {
		return nil, explain("pull", name, err)
	}
	c, err := decodeConfig(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	a.Config = *c
	return a, a.checkLayers()
}

// manifest reads one, and returns its config's descriptor.
func (a *Artefact) manifest(name string, b []byte) (ocispec.Descriptor, error) {
	var m ocispec.Manifest
	if err := json.Unmarshal(b, &m); err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("%s: %w", name, damaged("it can't be read: %v", err))
	}
	if m.ArtifactType != ArtifactType || m.Config.MediaType != configType {
		kind := m.ArtifactType
		if kind == "" {
			kind = m.Config.MediaType
		}
		return ocispec.Descriptor{}, noTemplate(name, kind)
	}
	a.layers = m.Layers
	return m.Config, nil
}

func noTemplate(name, kind string) error {
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("%s is no template, but %.100q: `cube template build` makes templates of images", name, kind))
}

// checkLayers checks that the layers may be the parts of what the config describes.
func (a *Artefact) checkLayers() error {
	all := parts(&a.Machine.Snapshot)
	if len(a.layers) != len(all) {
		return damaged("it has %d layers for %d parts", len(a.layers), len(all))
	}
	for i, l := range a.layers {
		// What can't be compressed grows a little.
		if most := all[i].bytes() + all[i].bytes()/64 + 4096; l.MediaType != partType || l.Size < 1 || l.Size > most {
			return damaged("layer %d is %d bytes of %.100q, at most %d can be", i, l.Size, l.MediaType, most)
		}
		if err := l.Digest.Validate(); err != nil || l.Digest.Algorithm() != digest.SHA256 {
			return damaged("layer %d has the digest %.100q", i, l.Digest)
		}
	}
	return nil
}

// blob reads something that is small.
func (a *Artefact) blob(ctx context.Context, d ocispec.Descriptor, most int64) ([]byte, error) {
	if err := d.Digest.Validate(); err != nil || d.Digest.Algorithm() != digest.SHA256 {
		return nil, damaged("it has the digest %.100q", d.Digest)
	}
	if d.Size < 1 || d.Size > most {
		return nil, damaged("it has a description of %d bytes, at most %d can be", d.Size, most)
	}
	r, err := a.fetch(ctx, d)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, d.Size+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) != d.Size || digest.FromBytes(b) != d.Digest {
		return nil, errNotWhole
	}
	return b, nil
}

var errNotWhole = errdefs.ErrDataLoss.WithMessage("what the registry gives isn't what its digest stands for")

// fetch asks for a blob by nothing but its digest: a descriptor may name other places.
func (a *Artefact) fetch(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	return a.fetcher.Fetch(ctx, ocispec.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size})
}

// local is an error of this host's, which is none of the registry's.
type local struct{ error }

func (l *local) Unwrap() error { return l.error }

// explain says in a line what has become of a request: the library repeats the URL at every layer.
func explain(verb, name string, err error) error {
	var own *local
	if errors.As(err, &own) {
		return fmt.Errorf("%s %s: %w", verb, name, own.error)
	}
	why := err.Error()
	var request *url.Error
	if errors.As(err, &request) {
		why = request.Err.Error()
	}
	message := fmt.Sprintf("%s %s: %s", verb, name, why)
	switch {
	case errdefs.IsDataLoss(err), errdefs.IsFailedPrecondition(err), errdefs.IsResourceExhausted(err), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s %s: %w", verb, name, err)
	case errdefs.IsNotFound(err):
		return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("%s %s: the registry doesn't have it", verb, name))
	case errdefs.IsPermissionDenied(err):
		return errdefs.ErrPermissionDenied.WithMessage(message)
	case errdefs.IsUnauthorized(err), errors.Is(err, docker.ErrInvalidAuthorization):
		return errdefs.ErrPermissionDenied.WithMessage(message + "; --user names one that may")
	}
	return errdefs.ErrUnavailable.WithMessage(message + "; check the name and the network")
}
