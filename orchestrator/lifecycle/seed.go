package lifecycle

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// SignUpload signs where a client may put a file, so that it is known to have been told so by this installation.
func (e *Engine) SignUpload(to string) string { return e.seed.upload(to) }

// seed is what all tokens of this installation are made from, so that none is stored.
type seed [32]byte

// loadSeed reads the installation's seed, or makes it where there is none. The file is its owner's alone.
func loadSeed(path string) (s seed, err error) {
	b, err := os.ReadFile(path)
	if err == nil && len(b) != len(s) {
		return s, fmt.Errorf("the seed of tokens %s has %d bytes, not %d: restore a backup of it, or remove it, and sandboxes have other tokens", path, len(b), len(s))
	}
	if err == nil {
		copy(s[:], b)
		return s, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return s, fmt.Errorf("read the seed of tokens: %w", err)
	}
	_, _ = rand.Read(s[:]) // never fails
	if err := writeWhole(path, s[:]); err != nil {
		return s, fmt.Errorf("write the seed of tokens: %w", err)
	}
	return s, nil
}

// writeWhole writes a file that is there completely, or not at all.
func writeWhole(path string, b []byte) (err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".new-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil // the file is there: it has its name
	}
	return errors.Join(d.Sync(), d.Close())
}

func (s seed) token(of string) string {
	m := hmac.New(sha256.New, s[:])
	m.Write([]byte(of))
	return hex.EncodeToString(m.Sum(nil))
}

// envd is the token that a secure sandbox's envd asks for, traffic the one that the data plane asks for, and hook the one by which
// a sandbox's init hook knows the control plane. upload has a client put a file where it was told to.
func (s seed) envd(id string) string    { return s.token(id) }
func (s seed) traffic(id string) string { return s.token("sandbox-traffic-" + id) }
func (s seed) hook(id string) string    { return s.token("sandbox-hook-" + id) }
func (s seed) upload(to string) string  { return s.token("upload-" + to) }

const idAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789"

// randomID is n random letters and digits.
func randomID(n int) string {
	// 252 is the largest multiple of 36 in a byte: what is above would make some letters likelier.
	id := make([]byte, 0, n)
	var b [32]byte
	for len(id) < n {
		_, _ = rand.Read(b[:]) // never fails
		for _, c := range b {
			if c < 252 && len(id) < n {
				id = append(id, idAlphabet[c%36])
			}
		}
	}
	return string(id)
}

// newSandboxID is a sandbox's id: "i" and 20 letters and digits.
func newSandboxID() string { return "i" + randomID(20) }
