package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/pkg/archive/compression"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/docker/go-units"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// registryConfig is where containerd's users describe their registries and mirrors.
const registryConfig = "/etc/containerd/certs.d"

// Image is an image of the store.
type Image struct {
	Name    string        `json:"name"`
	Digest  digest.Digest `json:"digest"`
	Size    int64         `json:"size"` // bytes of content for this platform, 0 when it can't be told
	Created time.Time     `json:"created"`
	// Platforms are those whose content is here.
	Platforms []string `json:"platforms"`
	// Unpacked says that the snapshotter has the image's disk.
	Unpacked bool `json:"unpacked"`
}

// normalize gives a short name its registry, repository and tag, as everywhere: debian is docker.io/library/debian:latest.
func normalize(ref string) (string, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", fmt.Errorf("%q is not an image name: %w", ref, err)
	}
	return named.String(), nil
}

// find looks an image up by the name as given, then by its full name. name is the full name even when the error is
// errdefs.ErrNotFound.
func (c *Client) find(ctx context.Context, ref string) (img client.Image, name string, err error) {
	name, err = normalize(ref)
	if err != nil {
		return nil, "", err
	}
	for _, n := range slices.Compact([]string{ref, name}) {
		img, err = c.ctrd.GetImage(ctx, n)
		if err == nil {
			return img, n, nil
		}
		if !errdefs.IsNotFound(err) {
			return nil, "", fmt.Errorf("look up image %s: %w", n, err)
		}
	}
	return nil, name, err
}

// ensure returns an image whose disk the snapshotter has, pulling and unpacking it as needed. outside is as in PullOptions.
func (c *Client) ensure(ctx context.Context, ref string, outside bool, p Progress) (client.Image, error) {
	ctx, done, err := c.lease(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	img, name, err := c.find(ctx, ref)
	switch {
	case err == nil:
		return img, c.unpack(ctx, img, p)
	case !errdefs.IsNotFound(err):
		return nil, err
	case name == Blank:
		return c.makeBlank(ctx)
	}
	img, err = c.pull(ctx, name, PullOptions{Outside: outside, Progress: p})
	if err != nil {
		return nil, fmt.Errorf("the image isn't here: %w", err)
	}
	return img, nil
}

// unpack makes the image's disk unless it exists.
func (c *Client) unpack(ctx context.Context, img client.Image, p Progress) error {
	if err := c.checkPlatform(ctx, img); err != nil {
		return err
	}
	done, err := img.IsUnpacked(ctx, Snapshotter)
	if err != nil {
		return fmt.Errorf("look up the disk of image %s: %w", img.Name(), err)
	}
	if done {
		return nil
	}
	defer p.step("unpacking " + img.Name())()
	err = img.Unpack(ctx, Snapshotter)
	switch {
	case err == nil:
		return nil
	case strings.Contains(err.Error(), unix.ENOSPC.Error()) && !errdefs.IsResourceExhausted(err): // of the disk, not of the store
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("image %s doesn't fit on a disk of %s (store.disk_size)", img.Name(), units.BytesSize(float64(c.cfg.Store.DiskSize))))
	}
	return fmt.Errorf("unpack image %s: %w", img.Name(), err)
}

// checkPlatform refuses an image that is for other machines only.
func (c *Client) checkPlatform(ctx context.Context, img client.Image) error {
	store := img.ContentStore()
	m, err := images.Manifest(ctx, store, img.Target(), platforms.Default())
	if err == nil {
		// The platform of an image that is no index is in its configuration, where Manifest doesn't look.
		p, err := images.ConfigPlatform(ctx, store, m.Config)
		if err != nil {
			return fmt.Errorf("read image %s: %w", img.Name(), err)
		}
		if p.Architecture != "" && !platforms.Default().Match(p) {
			return foreignImage(img.Name(), p)
		}
		return nil
	}
	if !errdefs.IsNotFound(err) {
		return fmt.Errorf("read image %s: %w", img.Name(), err)
	}
	has, perr := images.Platforms(ctx, store, img.Target())
	if perr != nil || len(has) == 0 || slices.ContainsFunc(has, platforms.Default().Match) {
		return fmt.Errorf("image %s isn't complete: %w; import or pull it again", img.Name(), err)
	}
	return foreignImage(img.Name(), has...)
}

func foreignImage(name string, has ...platforms.Platform) error {
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("image %s is for %s, this machine runs %s: take the image for that architecture",
		name, strings.Join(formatAll(has), ", "), platforms.Format(platforms.DefaultSpec())))
}

func formatAll(all []platforms.Platform) []string {
	var out []string
	for _, p := range all {
		out = append(out, platforms.Format(platforms.Normalize(p)))
	}
	return out
}

// PullOptions say how to pull.
type PullOptions struct {
	// User and Secret are for the registry; "" pulls as nobody.
	User, Secret string
	// Outside says that somebody else has named it: nothing of this host and its networks is asked, unless the host's configuration
	// describes the registry, and what is too large for a sandbox isn't pulled.
	Outside bool
	// Labels are containerd's.
	Labels   map[string]string
	Progress Progress
}

// Pull fetches an image from its registry and unpacks it. It returns the image's full name.
func (c *Client) Pull(ctx context.Context, ref string, o PullOptions) (string, error) {
	name, err := normalize(ref)
	if err != nil {
		return "", err
	}
	ctx, done, err := c.lease(c.context(ctx))
	if err != nil {
		return "", err
	}
	defer done()
	img, err := c.pull(ctx, name, o)
	if err != nil {
		return "", err
	}
	return img.Name(), nil
}

func (c *Client) pull(ctx context.Context, name string, o PullOptions) (client.Image, error) {
	stop := o.Progress.step("pulling " + name)
	img, err := c.ctrd.Pull(ctx, name, c.remote(ctx, name, o)...)
	stop()
	if err != nil {
		why := fmt.Sprintf("pull %s: %s", name, pullCause(err))
		switch {
		case errdefs.IsOutOfRange(err):
			return nil, errdefs.ErrOutOfRange.WithMessage(why)
		case errdefs.IsResourceExhausted(err):
			return nil, errdefs.ErrUnavailable.WithMessage(why)
		}
		why += "; check the name and the network, or `cube image import` it from a file"
		switch {
		case errdefs.IsNotFound(err):
			return nil, errdefs.ErrNotFound.WithMessage(why)
		case errdefs.IsPermissionDenied(err):
			return nil, errdefs.ErrPermissionDenied.WithMessage(why)
		}
		return nil, errdefs.ErrUnavailable.WithMessage(why)
	}
	return img, c.unpack(ctx, img, o.Progress)
}

// remote is how an image is asked for.
func (c *Client) remote(ctx context.Context, name string, o PullOptions) []client.RemoteOpt {
	// Without a scheme of ours, registries on this machine may speak plain HTTP, where there is no one to listen in; all
	// others must speak TLS. What the host's containerd configuration says of a registry goes first.
	opts := []client.RemoteOpt{client.WithResolver(docker.NewResolver(docker.ResolverOptions{Hosts: o.Hosts(ctx, name)})), client.WithPullLabels(o.Labels)}
	if o.Outside {
		w := &reading{info: func(ctx context.Context, d digest.Digest) (content.Info, error) {
			return c.ctrd.ContentStore().Info(ctx, d)
		}}
		opts = append(opts, client.WithImageHandler(&bounds{cfg: c.cfg}), client.WithImageHandlerWrapper(w.wrap))
	}
	return opts
}

// credentials are for the image's own registry: a mirror gets none.
func (o PullOptions) credentials(name string) func(host string) (user, secret string, err error) {
	registry := registryOf(name)
	return func(host string) (string, string, error) {
		if own, err := docker.DefaultHost(registry); err != nil || host != own && host != registry {
			return "", "", err
		}
		return o.User, o.Secret, nil
	}
}

// registryOf is the registry of a full name.
func registryOf(name string) string {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return ""
	}
	return reference.Domain(named)
}

// pullCause says in a few words why a pull failed: the library repeats the URL at every layer.
func pullCause(err error) string {
	var request *url.Error
	switch {
	case errors.As(err, &request):
		return request.Err.Error()
	case errdefs.IsNotFound(err):
		return "the registry doesn't have it"
	}
	return err.Error()
}

// ImportOptions say how to import.
type ImportOptions struct {
	// Name is given to the archive's image beside the names that the archive has, which may be none.
	Name     string
	Progress Progress
}

// Import reads a Docker or OCI archive, compressed or not, and unpacks its images. It returns their names.
func (c *Client) Import(ctx context.Context, r io.Reader, o ImportOptions) ([]string, error) {
	ctx, done, err := c.lease(c.context(ctx))
	if err != nil {
		return nil, err
	}
	defer done()
	plain, err := compression.DecompressStream(r)
	if err != nil {
		return nil, fmt.Errorf("read the archive: %w", err)
	}
	defer plain.Close()

	opts := []client.ImportOpt{client.WithAllPlatforms(true), client.WithSkipMissing(), client.WithImageRefTranslator(fullName)}
	if o.Name != "" {
		name, err := normalize(o.Name)
		if err != nil {
			return nil, err
		}
		opts = append(opts, client.WithIndexName(name))
	}
	stop := o.Progress.step("importing")
	imgs, err := c.ctrd.Import(ctx, plain, opts...)
	stop()
	if err != nil {
		return nil, fmt.Errorf("not a complete Docker or OCI image archive: %w", err)
	}
	if len(imgs) == 0 {
		return nil, errors.New("the archive doesn't say what its image is called: give it a --name")
	}
	var names []string
	for _, i := range imgs {
		if err := c.unpack(ctx, client.NewImage(c.ctrd, i), o.Progress); err != nil {
			// What can't run here is of no use here.
			cctx, cancel := c.cleanup(ctx)
			defer cancel()
			return nil, errors.Join(err, c.ctrd.ImageService().Delete(cctx, i.Name))
		}
		names = append(names, i.Name)
	}
	return names, nil
}

// fullName is the image name in an OCI layout's reference annotation, "" when that is a mere tag.
func fullName(ref string) string {
	if !strings.ContainsAny(ref, "/:") {
		return ""
	}
	name, err := normalize(ref)
	if err != nil {
		return ""
	}
	return name
}

// Images lists the images, by name.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	ctx = c.context(ctx)
	list, err := c.ctrd.ListImages(ctx)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	out := make([]Image, 0, len(list))
	for _, img := range list {
		i := Image{Name: img.Name(), Digest: img.Target().Digest, Created: img.Metadata().CreatedAt}
		// What can't be told of an incomplete image is left out rather than failing the list.
		i.Size, _ = img.Size(ctx)
		if has, err := images.Platforms(ctx, img.ContentStore(), img.Target()); err == nil {
			i.Platforms = formatAll(has)
		}
		i.Unpacked, _ = img.IsUnpacked(ctx, Snapshotter)
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b Image) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// RemoveImage removes an image and, with the next collection, which it waits for, what only that image needs.
func (c *Client) RemoveImage(ctx context.Context, ref string) error {
	ctx = c.context(ctx)
	_, name, err := c.find(ctx, ref)
	if errdefs.IsNotFound(err) {
		return fmt.Errorf("no image %s: `cube image ls` lists them", name)
	}
	if err != nil {
		return err
	}
	if err := c.ctrd.ImageService().Delete(ctx, name, images.SynchronousDelete()); err != nil {
		return fmt.Errorf("remove image %s: %w", name, err)
	}
	return nil
}
