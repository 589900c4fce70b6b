package builds

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/errdefs"
)

const (
	// maxRatio is how much larger what is uploaded may be without its compression than an upload may be with it.
	maxRatio = 10
	// maxEntries bounds what there is in a tar.
	maxEntries = 1 << 20
)

// pack copies a tar to a file, gzipped if it isn't, and makes sure that it is one, of at most so many bytes. What isn't is
// errdefs.ErrInvalidArgument.
func pack(to io.Writer, from io.Reader, most int64) error {
	r := bufio.NewReader(from)
	magic, _ := r.Peek(2) // what can't be read isn't a tar
	if !bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		// Speed: it is read once or twice.
		w, err := gzip.NewWriterLevel(to, gzip.BestSpeed)
		if err != nil {
			return err
		}
		both := io.TeeReader(r, w)
		if err := walk(both, most); err != nil {
			return err
		}
		return w.Close()
	}
	both := io.TeeReader(r, to)
	plain, err := gzip.NewReader(both)
	if err != nil {
		return notTar(err)
	}
	return walk(plain, most)
}

// walk reads a tar to its end, and what is behind that.
func walk(from io.Reader, most int64) error {
	limited := &atMost{r: from, left: most}
	t := tar.NewReader(limited)
	for n := 0; ; n++ {
		_, err := t.Next()
		switch {
		case err == io.EOF && n == 0:
			return notTar(errors.New("there is nothing in it"))
		case err == io.EOF:
			_, err := io.Copy(io.Discard, limited)
			if err != nil {
				return unpacked(limited, most, err)
			}
			return nil
		case err != nil:
			return unpacked(limited, most, err)
		case n == maxEntries:
			return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("the tar has more than %d entries", maxEntries))
		}
	}
}

func unpacked(r *atMost, most int64, err error) error {
	if r.left < 0 {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("the tar has more than %d bytes without its compression", most))
	}
	return notTar(err)
}

// notTar is the error of what isn't a tar.
func notTar(err error) error {
	return errdefs.ErrInvalidArgument.WithMessage("what was uploaded isn't a tar, or a gzipped one: " + err.Error())
}
